"""A network's frozen weights: their form, their device, and how they get there."""

"""Where a network's frozen weights lie, in what form and on which device, and how they come there."""

"""Several methods trained to one budget, and what tells them apart."""

"""A training from its configuration to its result: what is checked before, what is told after."""

"""A training run from its configuration to its result: the checks before it and the summary after it."""

"""Where a model is, and its small files: on the hub, in its cache, in a single file."""

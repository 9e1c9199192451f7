"""Where a model is and what it says of itself in kilobytes: on the hub, in its cache, in a single file."""

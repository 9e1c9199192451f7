"""`flowrl eval`: measures models and folders of images on a benchmark; see `flowrl.evaluation.benchmark`."""

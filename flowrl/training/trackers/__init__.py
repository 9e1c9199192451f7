"""Where a run's numbers, samples and report go besides its own files: TensorBoard, Weights & Biases, trackio."""

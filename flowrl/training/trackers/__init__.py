"""Where a run's numbers, samples and report go beside its own files: TensorBoard, Weights & Biases, trackio."""

"""Where a run's numbers, samples and report go beside its folder's own files: TensorBoard, Weights & Biases, trackio."""

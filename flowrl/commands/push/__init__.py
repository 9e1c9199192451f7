"""`flowrl push`: a model card beside the LoRA and its images, in a folder or on the hub."""

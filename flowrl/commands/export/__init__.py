"""`flowrl export`: a LoRA in the file forms that other programs read."""

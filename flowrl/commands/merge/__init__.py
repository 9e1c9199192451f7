"""`flowrl merge`: a LoRA made part of the weights of its base model."""

"""`flowrl sample`: images or videos of a base or tuned model."""

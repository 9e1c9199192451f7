"""`flowrl reward train`: a preference head of your own."""

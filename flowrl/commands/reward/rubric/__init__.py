"""`flowrl reward rubric`: rules that explain preferences."""

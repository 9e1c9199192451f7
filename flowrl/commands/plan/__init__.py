"""`flowrl plan CONFIG`: what a run will do and need, before anything is downloaded."""

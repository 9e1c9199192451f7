"""`flowrl train`: checks a configuration, runs its recipe, says what came out."""

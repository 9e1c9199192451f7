"""Finished evaluations side by side (`flowrl eval --compare`) and in a model card (`--model-card`)."""

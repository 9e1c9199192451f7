"""Draws a model's images for lists of prompts: finding the model, drawing, search, folders, scorers, journals."""

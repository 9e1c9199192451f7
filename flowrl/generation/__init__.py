"""Images of a model for lists of prompts: which model is meant, drawing, search, folders, scorers, journals."""

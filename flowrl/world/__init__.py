"""The embedded world: drawn scenes of coloured shapes, prompts in GenEval's wording, a detector that reads pixels."""

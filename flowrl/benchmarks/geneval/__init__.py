"""GenEval: its rules, prompts, metadata and scores."""

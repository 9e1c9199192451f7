"""The prompts of a run: prompt files and datasets, the images that they name, pairs, grids, curricula."""

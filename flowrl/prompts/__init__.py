"""What a run asks for: prompt files and datasets, the images they name, pairs, grids, curricula."""

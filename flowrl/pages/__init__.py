"""Pages of runs, benches, comparisons, evaluations."""

"""HTML, charts and terminal text; knows nothing of runs."""

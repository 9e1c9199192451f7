"""Looking at a reward before training on it: scores of a folder, a reliability card, realism of a run's images."""

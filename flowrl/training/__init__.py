"""What every recipe does around its own step: run folder, loop, sampling, scoring, credit, learner, checkpoints."""

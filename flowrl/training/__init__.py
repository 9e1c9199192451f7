"""What surrounds the step of every recipe: run folder, loop, sampling, scoring, credit, learner, checkpoints."""

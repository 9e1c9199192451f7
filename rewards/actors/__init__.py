"""Rewards that workers on Ray compute for the run (`workers.rewards`)."""

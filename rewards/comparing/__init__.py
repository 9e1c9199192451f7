"""Rewards from comparing samples of one prompt: comparators, tournaments, win rates."""

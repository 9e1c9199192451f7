"""Losses as pure functions: policy gradient, forward process, preferences, gradient paths of rewards."""

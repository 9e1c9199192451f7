"""Votes of people as a reward."""

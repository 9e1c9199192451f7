"""The page of runs while they train."""

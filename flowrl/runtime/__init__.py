"""What any program of the package needs, and nothing of what it does."""

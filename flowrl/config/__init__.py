"""The configuration of a run: its sections, the strict loader, and the vocabulary of other toolkits."""

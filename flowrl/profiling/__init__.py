"""The phases of an iteration timed on this machine, beside what the machine could reach."""

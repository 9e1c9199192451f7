"""Times the phases of an iteration on this machine, and compares them with the machine's limits."""

"""What would stop a run, or went wrong in one."""

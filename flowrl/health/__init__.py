"""Finds what would stop a run, or what went wrong in one."""

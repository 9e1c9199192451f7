"""The processes of a run: devices, layouts of copies, parts and shared tokens."""

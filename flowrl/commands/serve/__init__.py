"""`flowrl serve`: rewards behind HTTP."""

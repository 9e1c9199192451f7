"""One folder or file per command of the command line."""

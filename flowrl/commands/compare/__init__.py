"""`flowrl compare`: methods trained to the same cost on the same prompts and seeds, a table and a page."""

"""`flowrl sweep`: one tuned model under many RLG scales, beside search at equal cost, as a table and a page."""

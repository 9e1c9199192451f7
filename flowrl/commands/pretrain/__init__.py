"""`flowrl pretrain`: the embedded models and their scorer from scratch."""

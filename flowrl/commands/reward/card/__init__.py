"""`flowrl reward card`: how far a reward can be trusted to train on."""

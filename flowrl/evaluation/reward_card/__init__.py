"""How reliable a reward is."""

"""Rewards of the embedded world: verifiers of scenes, clips, edits and grids, and a differentiable score."""

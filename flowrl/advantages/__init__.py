"""Rewards relative to their group: calibration, normalisation, aggregation, shaping."""

from flowrl.advantages.normalise import group_advantages as group_advantages

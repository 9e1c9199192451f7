"""Rewards on the sound of videos."""

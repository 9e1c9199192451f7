"""Publishes models and LoRAs: cards, uploads, merges, exports."""

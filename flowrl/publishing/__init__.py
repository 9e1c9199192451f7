"""Models and LoRAs for others: cards, uploads, merges, exports."""

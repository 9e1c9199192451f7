"""Trains several methods to one budget and compares them."""

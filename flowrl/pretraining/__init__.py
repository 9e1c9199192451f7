"""Makers of the embedded models and of the embedded scorers."""

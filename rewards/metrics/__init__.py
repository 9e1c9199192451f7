"""Measures of images that others publish: their packages, or their weights on stock classes."""

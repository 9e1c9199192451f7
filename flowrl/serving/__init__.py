"""Serves rewards over HTTP: replicas, environments."""

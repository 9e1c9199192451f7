"""`flowrl reward published`."""

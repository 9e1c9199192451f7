"""Rewards in another process: server, wire format, client, retries."""

"""Writes first configurations, translates those of other toolkits, and fetches published prompt sets."""

"""Lite topics: the light queues of a million names in a few files."""

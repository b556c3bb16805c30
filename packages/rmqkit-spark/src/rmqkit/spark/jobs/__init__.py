"""Whole jobs over a store: each is a function that gets a session and a path, and returns its result."""

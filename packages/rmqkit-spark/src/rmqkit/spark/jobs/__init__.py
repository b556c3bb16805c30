"""Whole jobs over a store: each is a function of a session and a path that gives a data frame."""

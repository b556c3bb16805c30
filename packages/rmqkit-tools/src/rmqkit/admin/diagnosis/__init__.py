"""Faults of a cluster and of its machines, and causes why a message was not consumed."""

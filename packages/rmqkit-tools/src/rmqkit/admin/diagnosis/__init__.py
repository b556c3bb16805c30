"""Diagnosis: faults of a cluster and of its machines, and the reason why a message was not consumed."""

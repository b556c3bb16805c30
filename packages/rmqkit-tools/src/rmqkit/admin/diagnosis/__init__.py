"""Diagnosis: faults of a cluster and of its machines, and the cause why a message was not consumed."""

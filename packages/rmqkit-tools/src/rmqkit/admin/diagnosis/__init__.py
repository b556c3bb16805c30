"""The diagnosis of faults in clusters and machines, and of messages that were not consumed."""

"""The archive of a log: sealed segments in a folder or an object store. Consumers read them like the log itself."""

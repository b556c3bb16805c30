"""The archive of a log: sealed segments in a folder or an object store, which consumers read like the log itself."""

"""The commit log: the files of all records, how they become durable, and their recovery at a start."""

"""The index files, which find messages by their keys."""

"""IndexFiles: messages found by their keys."""

"""Commands that run servers, check them, and read their folders."""

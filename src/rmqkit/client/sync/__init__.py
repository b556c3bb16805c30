"""The facade for programs without an event loop."""

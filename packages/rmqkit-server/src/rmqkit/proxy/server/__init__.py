"""A proxy as a server of its own, its settings and metrics."""

"""A proxy as a separate server, its settings and metrics."""

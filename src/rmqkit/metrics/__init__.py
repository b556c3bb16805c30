"""Metrics: the table of their names, the values they have, and the text that Prometheus reads."""

"""Subscriptions and what they match: properties in, verdict out; no I/O. Source: behaviour.md §6."""

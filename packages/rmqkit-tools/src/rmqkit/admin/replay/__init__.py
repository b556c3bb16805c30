"""Replay of messages, and dead letters, from which most replayed messages come."""

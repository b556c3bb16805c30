"""Consume queues, which store the place of each message in the log."""

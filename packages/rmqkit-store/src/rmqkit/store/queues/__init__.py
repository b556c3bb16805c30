"""Consume queues: the place of each message of a topic's queue in the log."""

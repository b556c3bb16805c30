"""Sends: checks, storing, answers (SendMessageProcessor)."""

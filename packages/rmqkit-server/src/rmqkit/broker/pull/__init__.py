"""Pulls and queries of messages (PullMessageProcessor, PullRequestHoldService, QueryMessageProcessor)."""

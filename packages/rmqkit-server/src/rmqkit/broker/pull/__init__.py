"""Messages that go out by pull and query (PullMessageProcessor, PullRequestHoldService, QueryMessageProcessor)."""

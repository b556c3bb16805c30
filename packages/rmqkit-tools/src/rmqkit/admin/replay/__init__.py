"""Messages that are sent a second time, and dead letters, from which most of them come."""

"""Half messages, their decisions, and check-back (TransactionalMessageService)."""

"""Half messages, their ends, and asking producers about them (TransactionalMessageService)."""

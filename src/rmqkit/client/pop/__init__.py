"""Consumers by POP (ConsumeMessagePopConcurrentlyService)."""

"""POP: pops, acks, check points and what is revived (PopMessageProcessor, PopBufferMergeService, PopReviveService)."""

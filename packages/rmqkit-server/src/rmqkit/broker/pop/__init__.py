"""POP: pops, acks, check points and redelivery (PopMessageProcessor, PopBufferMergeService, PopReviveService)."""

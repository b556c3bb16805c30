"""Messages that come in: checked, stored, answered (SendMessageProcessor)."""

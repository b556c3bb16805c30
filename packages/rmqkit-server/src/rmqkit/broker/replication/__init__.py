"""A broker as master, slave or acting master of its group (HAService, SlaveSynchronize, EscapeBridge)."""

"""Replication: a broker as master, slave or acting master (HAService, SlaveSynchronize, EscapeBridge)."""

"""The formats of RocketMQ, pure: bytes in, values out. No socket, file, clock or thread is touched here."""

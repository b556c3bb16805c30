"""The formats of RocketMQ, pure: bytes in, values out, without sockets, files, clock or threads."""

"""The formats of RocketMQ, as pure functions of bytes and values: no sockets, files, clocks or threads."""

"""RocketMQ-compatible messaging in Python."""

"""Producers, and the path of a message to a broker (DefaultMQProducerImpl)."""

"""Producers: what programs send with, and how a send reaches a broker (DefaultMQProducerImpl)."""

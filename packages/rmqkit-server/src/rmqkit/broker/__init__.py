"""The broker: it receives, stores and delivers messages (``BrokerController``). Source: behaviour.md §2–§6."""

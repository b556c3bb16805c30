"""The broker: takes, keeps and hands out messages (``BrokerController``). Source: behaviour.md §2–§6."""

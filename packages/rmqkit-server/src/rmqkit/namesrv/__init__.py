"""The name server: which brokers exist and where a topic's queues are (``NamesrvController``).

Source: behaviour.md §1.
"""

"""The name server: the registered brokers, and the queues of topics on them (``NamesrvController``).

Source: behaviour.md §1.
"""

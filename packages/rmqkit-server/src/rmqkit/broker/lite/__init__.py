"""Lite topics at the broker: subscriptions, delivery, expiry."""

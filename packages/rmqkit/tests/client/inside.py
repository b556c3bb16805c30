"""Access of tests to private names of a client. No other test file uses these names."""

from __future__ import annotations

from typing import Any


def coordinator_of(consumer: Any) -> Any:
    """Return the part of a consumer that allocates queues."""
    return consumer._coordinator


def offsets_of(consumer: Any) -> Any:
    """Return the object in which a consumer stores its consumed offsets."""
    return consumer._offsets


def poll_buffer_of(consumer: Any) -> Any:
    """Return the buffer of messages that were pulled and not polled yet."""
    return consumer._poll_buffer


def runtime_of(client: Any) -> Any:
    """Return the connections and routes of a producer or consumer."""
    return client._runtime


def sender_of(producer: Any) -> Any:
    """Return the part of a producer that sends and retries."""
    return producer._sender


def service_of(consumer: Any) -> Any:
    """Return the part of a consumer that calls the handler."""
    return consumer._service

"""Brokers that cannot be reached: told once when they go and once when they are back, however many queues they have.

Everything that asks brokers regularly reports here: pulls, heartbeats, saved offsets. Loop only.
"""

from __future__ import annotations

import logging

from rmqkit.clock import Clock

__all__ = ["Absences"]

_log = logging.getLogger(__name__)


class Absences:
    """The absent brokers of one client, by address, or by name where no address is known."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since_ms: dict[str, float] = {}

    def lost(self, address: str, error: Exception, what: str) -> None:
        """A broker could not be asked for something."""
        if address in self._since_ms:
            _log.debug("%s: %s", what, error)
            return
        self._since_ms[address] = self._clock.monotonic_ms()
        _log.warning("broker %s is away, it is asked again until it is back; %s: %s", address, what, error)

    def answers(self, address: str) -> None:
        """A broker was asked, and answered."""
        if self._since_ms:
            since_ms = self._since_ms.pop(address, None)
            if since_ms is not None:
                _log.info("broker %s is back after %.1f s", address, (self._clock.monotonic_ms() - since_ms) / 1000)

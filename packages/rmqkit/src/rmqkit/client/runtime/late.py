"""Brokers that find each pop too late, because their clocks are ahead of this machine's. Source: behaviour.md §4.8."""

from __future__ import annotations

import logging

_log = logging.getLogger(__name__)


class LateBrokers:
    """The brokers for which pops are late. A warning for each names the remedy."""

    def __init__(self, whose: str) -> None:
        self._whose = whose
        self._names: set[str] = set()

    def warn(self, broker_name: str) -> None:
        """Log a warning, once for each broker."""
        if broker_name not in self._names:
            self._names.add(broker_name)
            _log.warning(
                "%s: %s finds pops too late and does not wait for messages, so they arrive up to 1 s later: its clock "
                "is ahead of this machine's; synchronize both clocks, for example with: chronyc makestep",
                self._whose,
                broker_name,
            )

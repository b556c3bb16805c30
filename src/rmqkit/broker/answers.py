"""What the classes of handlers share: they work with the broker's parts and say beside each method what it answers."""

from __future__ import annotations

from rmqkit.broker.context import Parts
from rmqkit.protocol.command import Command
from rmqkit.remoting.answers import Answering, answers

__all__ = ["Handlers", "answers"]


class Handlers(Answering):
    """Methods that answer requests, each marked with `answers`."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts.settings.admin_addresses)
        self._address = parts.address
        self._settings = parts.settings
        self._identity = parts.identity
        self._clock = parts.clock
        self._store = parts.store
        self._topics = parts.topics
        self._groups = parts.groups
        self._offsets = parts.offsets
        self._clients = parts.clients
        self._filters = parts.filters
        self._long_polling = parts.long_polling
        self._pops = parts.pops
        self._durability = parts.durability
        self._queue_locks = parts.queue_locks
        self._schedule = parts.schedule
        self._timer = parts.timer
        self._statistics = parts.statistics
        self._counts = parts.counts
        self._told = parts.told
        self._ask_namesakes = parts.ask_namesakes
        self._may_serve = parts.may_serve

    async def _when_told(self, answer: Command) -> Command:
        """An answer that waits until the name servers know the topics that were made: the client may ask them next."""
        await self._told()
        return answer

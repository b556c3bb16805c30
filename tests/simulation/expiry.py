"""Retention in a run: the wall clock of a broker moves on by an hour, which is the retention of the plan, and an
operator lets the broker delete expired files. Unread messages are deleted, too, but only those older than the hour.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from rmqkit.testing.simulation import BrokerServer
from tests.simulation.ledger import Place, Sent

if TYPE_CHECKING:
    from tests.simulation.run import Run

HOUR_MS = 3_600_000
SETTINGS: dict[str, object] = {
    "fileReservedTime": 1,
    "deleteWhen": "",
    "cleanResourceInterval": 500,
    "mappedFileSizeCommitLog": 16 << 10,
    "mappedFileSizeConsumeQueue": 400,
}
SECONDS = 66.0
"""The first cycle of a broker is a minute after its start."""


class Expiry:
    """The oracles of retention.

    Attributes:
        findings: young messages that a broker deleted, and queues whose min offset is wrong.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._aged: dict[str, float] = {}
        self._lows: defaultdict[tuple[str, str, int], int] = defaultdict(int)
        self.findings: list[str] = []

    def age(self, server: str) -> None:
        """Let an hour pass on the wall clock of a broker."""
        self._run.world.machine(server).skew_ms += HOUR_MS
        self._aged[server] = self._run.world.now

    def look(self, server: BrokerServer) -> None:
        """Note the messages that a running broker has deleted since the last look. The broker may be in the middle of a
        call, so this reads only its memory."""
        name = str(server.settings["brokerName"])
        if server.broker is None or name not in self._aged:
            return
        queues, ledger = server.broker.context.store.queues, self._run.ledger
        for topic, queue_id in sorted({(place.topic, place.queue_id) for place in ledger.by_place}):
            queue = queues.get(topic, queue_id)
            low = 0 if queue is None else queue.min_offset
            for offset in range(self._lows[name, topic, queue_id], low):
                number = ledger.by_place.get(Place(topic, name, queue_id, offset))
                if number is not None:
                    self._deleted(ledger.sent[number])
            self._lows[name, topic, queue_id] = max(low, self._lows[name, topic, queue_id])

    def look_at_ends(self, server: BrokerServer) -> None:
        """Check that each queue of a broker has a message at its min offset."""
        if server.broker is None or not self._aged:
            return
        store = server.broker.context.store
        for topic, queue_id in sorted({(place.topic, place.queue_id) for place in self._run.ledger.by_place}):
            low, high = store.bounds(topic, queue_id)
            if low < high and store.earliest_store_time(topic, queue_id) < 0:
                self.findings.append(f"{topic}-{queue_id} of {server.name} begins at {low}, and there is no message")

    def judge(self, name: str, stored: dict[Place, int]) -> None:
        """Note the messages that are not in the log of a stopped broker, before the first ones that are."""
        lows: dict[tuple[str, int], int] = {}
        for place in stored:
            lows[place.topic, place.queue_id] = min(place.offset, lows.get((place.topic, place.queue_id), place.offset))
        for one in self._run.ledger.sent.values() if name in self._aged else ():
            place = one.place
            if place is None or place.broker != name or place in stored:
                continue
            low = lows.get((place.topic, place.queue_id))
            if low is None or place.offset < low:
                self._deleted(one)

    def _deleted(self, one: Sent) -> None:
        assert one.place is not None, "a deleted message had a place"
        deleted = self._run.ledger.deleted
        if one.at > self._aged[one.place.broker] and one.number not in deleted:
            self.findings.append(f"{one.number} at {one.place} was deleted, and it is younger than the retention")
        deleted.add(one.number)

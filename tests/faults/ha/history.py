"""Everything that two brokers served, their final stores, and the check that these are one history.

A place is a queue and an offset in it. Both brokers are read all the time; after each kill reading restarts some
messages earlier. A place with two different messages, on either broker, is a split history. At the end, when both
processes have exited, log files and queues must be equal, both stores must be sound, and everything that was served or
acknowledged must be in both.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from rmqkit.errors import RmqError
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import Command, decode_header, request
from rmqkit.protocol.message import read_messages
from rmqkit.protocol.properties import find_property
from rmqkit.protocol.record import body_crc
from rmqkit.protocol.schemas.pull import PullFlag, PullMessageRequest, PullMessageResponse
from rmqkit.store.offline import check as fsck
from rmqkit.store.settings import StoreSettings
from tests.faults.client.ledger import Ledger, Place
from tests.faults.ha.pair import BROKER, MASTER, QUEUES, SLAVE, TOPIC, Pair
from tests.faults.workload import read_everything
from tests.interop.replicas import log_difference
from tests.store.stores import opened

__all__ = ["History", "Message", "Watch", "body_of", "verdict"]

BACK_COUNT = 400
PAUSE_SECONDS = 0.05
PULL_COUNT = 32
BODY_BYTES = (0, 100, 1000, 3000, 40_000)
_GROUP = "CG-history"


class Message(NamedTuple):
    """The identity of a message."""

    msg_id: str
    physical_offset: int
    body_crc: int


def body_of(number: int) -> bytes:
    """Return the body of a message, which depends on its number. Some bodies span several frames of the replication."""
    chance = random.Random(number)
    return b"%d " % number + chance.randbytes(chance.randrange(chance.choices(BODY_BYTES, [2, 40, 20, 5, 1])[0] + 1))


class History:
    """Messages by place, as the brokers served them.

    Attributes:
        splits: descriptions of the places with two messages.
        counts: messages served, by broker.
        refusals: pulls without messages, by broker and code.
    """

    def __init__(self) -> None:
        self.served: dict[Place, Message] = {}
        self.splits: list[str] = []
        self.counts: Counter[str] = Counter()
        self.refusals: Counter[tuple[str, int]] = Counter()

    def note(self, role: str, place: Place, message: Message) -> None:
        """Record a message that a broker served."""
        self.counts[role] += 1
        if (before := self.served.setdefault(place, message)) != message:
            self.splits.append(f"{place} was {before}, and {role} served {message}")


class Watch:
    """A reader that reads all queues of one broker again and again."""

    def __init__(self, pair: Pair, role: str, history: History) -> None:
        self._pair = pair
        self._role = role
        self._history = history
        self._offsets = [0] * QUEUES

    def go_back(self) -> None:
        """Read the last messages again: a killed broker may serve other ones at their offsets."""
        self._offsets = [max(0, offset - BACK_COUNT) for offset in self._offsets]

    async def run(self) -> None:
        """Read until cancelled."""
        while True:
            for queue_id in range(QUEUES):
                await self._pull(queue_id)
            await asyncio.sleep(PAUSE_SECONDS)

    async def pull_all(self) -> None:
        """Pull from every queue once."""
        for queue_id in range(QUEUES):
            await self._pull(queue_id)

    async def _pull(self, queue_id: int) -> None:
        offset = self._offsets[queue_id]
        header = PullMessageRequest(
            _GROUP, TOPIC, queue_id, offset, PULL_COUNT, PullFlag.SUBSCRIPTION, 0, 0, 0, "*", "TAG"
        )
        try:
            answer = await self._pair.ask(self._role, request(RequestCode.PULL_MESSAGE, header))
        except RmqError:  # the broker is killed
            return
        if answer.code == ResponseCode.SUCCESS:
            self._take(queue_id, answer)
        elif answer.code != ResponseCode.PULL_NOT_FOUND:
            self._history.refusals[self._role, answer.code] += 1

    def _take(self, queue_id: int, answer: Command) -> None:
        for one in read_messages(answer.payload):
            place = Place(f"{BROKER}/{one.queue_id}", one.queue_offset)
            self._history.note(self._role, place, Message(one.msg_id, one.physical_offset, one.body_crc))
            assert one.queue_id == queue_id, f"{self._role} served {place} for queue {queue_id}"
        following = decode_header(answer, PullMessageResponse).next_begin_offset
        self._offsets[queue_id] = max(self._offsets[queue_id], following)


# -- the final check


def verdict(
    stores: Mapping[str, Path], settings: StoreSettings, end: int, ledger: Ledger, history: History
) -> list[str]:
    """Return the faults of the stores of stopped brokers, one line each. Both logs must end at ``end``."""
    faults = [f"split history: {split}" for split in history.splits[:5]]
    if difference := log_difference(stores[MASTER], stores[SLAVE], end):
        faults.append(f"the logs differ: {difference}")
    both = {}
    for role, root in stores.items():
        try:
            both[role] = _checked(root, settings, end, ledger, history)
        except AssertionError as error:
            faults.append(f"{role}: {error}")
    if len(both) == len(stores) and both[MASTER] != both[SLAVE]:
        places = sorted(place for place, _ in both[MASTER].items() ^ both[SLAVE].items())
        faults.append(f"{len(places)} places of the queues differ, the first is {places[0]}")
    return faults


def _checked(root: Path, settings: StoreSettings, end: int, ledger: Ledger, history: History) -> dict[Place, Message]:
    """Return the content of a store by place. Raises AssertionError: the content is wrong."""
    with opened(root, settings) as store:
        assert store.max_physical_offset == end, f"its log ends at {store.max_physical_offset}, not at {end}"
        everything = read_everything(store)
    found: dict[Place, Message] = {}
    numbers: defaultdict[int, list[tuple[Place, str]]] = defaultdict(list)
    for (topic, queue_id, offset), one in everything.items():
        place = Place(f"{BROKER if topic == TOPIC else topic}/{queue_id}", offset)
        msg_id = (find_property(one.properties, b"UNIQ_KEY") or b"").decode()
        found[place] = Message(msg_id, one.physical_offset, body_crc(one.body))
        if topic == TOPIC:
            number = int(one.body.split(b" ", 1)[0])
            assert one.body == body_of(number), f"the body of {number} at {place} is changed"
            numbers[number].append((place, msg_id))
    ledger.check_stored(numbers, 1)
    for place, message in history.served.items():
        assert found.get(place) == message, f"{place} was served as {message} and is {found.get(place)}"
    report = fsck.verify(root, settings)
    assert report.is_sound, "; ".join(map(str, report.findings[:5]))
    return found

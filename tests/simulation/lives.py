"""A topic that an operator deletes and creates again, and a group that the operator deletes while its members are dead.

Records that are on the disk when the operator begins a deletion belong to a former life of the topic. (Later ones may
be lost, and others stored in their place.) They stay in the log. Afterwards they must not be in the queues of the
topic, nor be delivered when consumers have handled their buffers. A broker that was away keeps the topic and the group.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rmqkit.admin import Admin
from rmqkit.protocol.message import ReceivedMessage, read_messages
from rmqkit.testing.simulation import BrokerServer
from tests.simulation.ledger import number_of

if TYPE_CHECKING:
    from tests.simulation.run import Run

TOPIC, GROUP = "Fleeting", "G-fleeting"
_QUEUES = 2
_HELD_SECONDS = 30.0
"""The time in which consumers may still handle messages that they got before the deletion."""


class Lives:
    """The oracles of deleted topics and groups.

    Attributes:
        findings: messages of a former life in the present one, and offsets of a deleted group.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._ends: dict[str, int] = {}
        self._deleted_at = 0.0
        self.findings: list[str] = []

    async def renew(self, admin: Admin) -> None:
        """Delete the topic and create it again. Raises RmqError: the cluster refuses, or does not answer."""
        names = [str(master.settings["brokerName"]) for master in self._run.cluster.masters]
        brokers = [master.broker for master in self._run.cluster.masters]
        ends = [0 if broker is None else broker.context.store.durable_offset for broker in brokers]
        await admin.topics.delete(TOPIC)
        left = [broker is not None and broker.context.topics.get(TOPIC) is not None for broker in brokers]
        self._ends |= {name: end for name, end, is_left in zip(names, ends, left, strict=True) if not is_left}
        self._deleted_at = self._run.world.now
        for name in names:
            await admin.topics.create(TOPIC, broker=name, read_queues=_QUEUES, write_queues=_QUEUES)

    async def delete_group(self, admin: Admin) -> None:
        """Delete the group. Raises RmqError: see `renew`."""
        if self._is_group_alive():
            return
        await admin.groups.delete(GROUP)
        for server in self._run.cluster.masters:
            if server.broker is not None and not self._is_group_alive():
                context = server.broker.context
                topics = context.offsets.topics(GROUP) if GROUP not in context.groups else []
                self.findings += [
                    f"{server.name} has offsets of {GROUP} in {topic}, which is deleted" for topic in topics
                ]

    def arrived(self, message: Any) -> None:
        """Look at a message that the group gets."""
        age = self._run.world.now - self._deleted_at
        if self._is_former(message) and age > _HELD_SECONDS and not message.reconsume_times:
            number = number_of(message.body)
            self.findings.append(f"{GROUP} got {number} of a former life of its topic, which ended {age:.0f} s ago")

    def look(self) -> None:
        """Look for messages of a former life in the queues."""
        for server in self._run.cluster.masters if self._ends else ():
            former = [one for one in _messages(server) if self._is_former(one)]
            for one in former[:1]:
                place = f"{one.queue_offset} in queue {one.queue_id} of {server.name}"
                self.findings.append(f"{number_of(one.body)} of a former life of {TOPIC} is at {place}")

    def _is_former(self, message: Any) -> bool:
        return bool(message.physical_offset < self._ends.get(message.broker_name, 0))

    def _is_group_alive(self) -> bool:
        return any(client.is_running for name, client in self._run.clients.items() if name.startswith(GROUP))


def _messages(server: BrokerServer) -> Iterator[ReceivedMessage]:
    """Return the messages in the queues of the topic."""
    if server.broker is None:
        return
    store = server.broker.context.store
    for queue_id in range(_QUEUES):
        low, high = store.bounds(TOPIC, queue_id)
        for offset in range(low, high):
            for record in store.get(TOPIC, queue_id, offset, count_max=1).records:
                for message in read_messages(bytes(record)):
                    message.broker_name = str(server.settings["brokerName"])
                    yield message

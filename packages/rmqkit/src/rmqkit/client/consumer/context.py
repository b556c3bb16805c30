"""The consumer context: the objects that the parts of a consumer share, and its subscriptions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from msgspec.structs import replace

from rmqkit.client.consumer.allocate import Allocate
from rmqkit.client.consumer.offsets import OffsetStore
from rmqkit.client.consumer.ordered import ClientQueueLocks
from rmqkit.client.consumer.process_queue import ProcessQueue
from rmqkit.client.runtime.runtime import ClientRuntime
from rmqkit.client.runtime.settings import ConsumerSettings
from rmqkit.errors import SettingsError
from rmqkit.filter import is_tag_type, subscription
from rmqkit.protocol.message import ReceivedMessage
from rmqkit.protocol.names import topic_fault
from rmqkit.protocol.schemas.clients import ConsumeMessageDirectlyResult, SubscriptionData


class ConsumeService(Protocol):
    """An object that consumes pulled messages. It calls handlers (`consume`, `ordered`, `pop.service`) or passes the
    messages to the program (`poll`)."""

    def put(self, process_queue: ProcessQueue, messages: list[ReceivedMessage]) -> None:
        """Start to consume messages that are now in the process queue."""
        ...

    def drop_stale(self) -> None:
        """Discard buffered messages of queues that this member no longer owns."""
        ...

    def advance_to(self, process_queue: ProcessQueue, offset: int) -> None:
        """Raise the offset of a queue without held messages: no message before the new offset matches the
        subscription."""
        ...

    async def unreadable(self, message: ReceivedMessage) -> None:
        """Remove a message with a body that cannot be unpacked.

        Raises RemotingError, PeerRefused: this failed, and the caller must try again.
        """
        ...

    def waits_for(self, message: ReceivedMessage) -> str:
        """Return the reason, as text for operators, why a message is not handled yet."""
        ...

    async def consume_directly(self, message: ReceivedMessage) -> ConsumeMessageDirectlyResult:
        """Consume a message that an operator selected. Raises ClientError: there is no handler."""
        ...


@dataclass(slots=True)
class ConsumerContext:
    """The objects that the parts of one consumer share. ``locks`` is set if the consumer is ordered and not
    broadcasting."""

    runtime: ClientRuntime
    group: str
    settings: ConsumerSettings
    offsets: OffsetStore
    consume_service: ConsumeService
    allocate: Allocate
    consume_type: str
    locks: ClientQueueLocks | None = None
    is_ordered: bool = False


class Subscriptions(dict[str, SubscriptionData]):
    """The subscriptions of one member, by topic."""

    def __init__(self, runtime: ClientRuntime, group: str) -> None:
        super().__init__()
        self._runtime = runtime
        self._group = group

    def put(self, topic: str, expression: str, expression_type: str) -> None:
        """Subscribe to a topic, or replace its subscription. Raises SettingsError: the topic or the expression is not
        valid.
        """
        fault = topic_fault(topic)
        if fault is not None:
            raise SettingsError(fault)
        if not isinstance(expression, str):
            raise SettingsError(
                f"subscription to topic {topic}: {expression!r} is not an expression: use '*' or 'A || B'; a handler "
                "goes in handler="
            )
        version = self._version(topic)
        try:
            self[topic] = subscription(topic, expression, expression_type=expression_type, version=version)
        except ValueError as error:
            raise SettingsError(f"subscription to topic {topic}: {error}") from None

    def renew_versions(self, topics: Iterable[str]) -> None:
        """Raise the versions. Brokers then consider these subscriptions newer than the subscriptions of other
        members.
        """
        for topic in self.keys() & topics:
            self[topic] = replace(self[topic], sub_version=self._version(topic))

    def _version(self, topic: str) -> int:
        """Return the time in ms, or the last version plus one if the clock was set back. Brokers store the highest
        version."""
        before = self[topic].sub_version if topic in self else 0
        return max(self._runtime.clock.now_ms(), before + 1)

    async def check(self) -> None:
        """Check that a broker can filter by the expressions that are not tags.
        Raises PeerRefused: the broker cannot. Raises RemotingError: the broker did not answer."""
        for topic, data in list(self.items()):
            brokers = self._runtime.routes.brokers_of(topic)
            if not is_tag_type(data.expression_type) and brokers:
                address = self._runtime.routes.any_address(brokers[0])
                assert address is not None, "a broker of a route has an address"
                await self._runtime.calls.check_subscription(address[1], self._runtime.client_id, self._group, data)

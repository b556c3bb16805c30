"""The sending of messages from an acting master to the masters of other brokers (``EscapeBridge``).

A broker that acts as master is a slave: its log is a copy of its master's log, so it cannot store messages. It sends
each due message like a producer to a queue of the same topic on another broker. The consumers read this queue, too.

====================  ==========================================================================================
message               how it is sent
====================  ==========================================================================================
delayed, now due      to its real topic, without DELAY, REAL_TOPIC, REAL_QID, which would delay it again
half                  to its real topic as a half message (TRAN_MSG): the other broker checks back from now on
retried               like a delayed message. Its tries were counted here, and the other broker accepts any count
====================  ==========================================================================================

Only the answer SUCCESS means that the message is stored, as durably as the other broker promises. After any other
answer, or without an answer, the caller retries: a message may be sent twice, but is never lost. The stored body is
sent unchanged, compressed or not. The born host is the address of this broker.
Use this module only on the event loop. Source: behaviour.md §9.1 (7), §10.5.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Iterator
from dataclasses import dataclass

from rmqkit.broker.messages import real_place, with_changes
from rmqkit.broker.registration import Registration
from rmqkit.broker.settings import BrokerSettings
from rmqkit.clock import Clock
from rmqkit.errors import NoRoute, RmqError
from rmqkit.protocol import names
from rmqkit.protocol import properties as property_names
from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.record import COMPRESSED, COMPRESSION_MASK
from rmqkit.protocol.schemas.send import SendMessageV2Request
from rmqkit.protocol.schemas.topics import Permission, TopicRoute
from rmqkit.remoting.client import RemotingClient
from rmqkit.rpc import BrokerCalls
from rmqkit.store.message_store import InnerMessage

__all__ = ["EscapeBridge"]

_TIMEOUT_MS = 3000
_ROUTE_MS_MAX = 30_000.0
_NO_ROUTE_MS_MAX = 1000.0
# Properties that refer to the log of this broker, and WAIT: with it the other broker may answer before the flush.
_OF_THIS_BROKER = (
    property_names.CLUSTER,
    property_names.MSG_REGION,
    property_names.TRACE_ON,
    property_names.PROPERTY_CRC,
    property_names.REAL_TOPIC,
    property_names.REAL_QUEUE_ID,
    property_names.TRANSACTION_PREPARED_QUEUE_OFFSET,
    property_names.WAIT,
)

# Properties that would delay a due message again.
_DUE = (property_names.DELAY, property_names.TRANSACTION_PREPARED)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Queue:
    address: str
    broker_name: str
    queue_id: int


class EscapeBridge:
    """The sender of a broker's messages to the masters of other brokers."""

    def __init__(
        self, settings: BrokerSettings, registration: Registration, client: RemotingClient, clock: Clock
    ) -> None:
        self._settings = settings
        self._registration = registration
        self._calls = BrokerCalls(client, _TIMEOUT_MS)
        self._clock = clock
        self._queues: dict[str, tuple[float, Iterator[_Queue]]] = {}
        self._failures: dict[str, str] = {}
        self._asking = asyncio.Lock()

    async def put(self, message: InnerMessage) -> bool:
        """Send a message. Return True if another broker has stored it. Log a failure once for each topic."""
        properties = message.parsed
        is_half = message.topic == names.HALF_TOPIC
        place = real_place(properties) if is_half else (message.topic, message.queue_id)
        if place is None:
            _log.error("skipping a half message that does not name its topic: %s", properties)
            return True  # after False the message would be retried without end, and later messages would wait
        topic = place[0]
        try:
            await self._send(topic, self._header(message, topic, properties, is_half=is_half), message.body)
        except RmqError as error:
            if not isinstance(error, NoRoute):
                # The master may have a new address, so drop the route. Keep an empty route for a while: otherwise each
                # try would send a request to the name servers.
                self._queues.pop(topic, None)
            if self._failures.get(topic) != str(error):
                _log.warning("cannot send a message for topic %s to another broker, trying again: %s", topic, error)
                self._failures[topic] = str(error)
            return False
        self._failures.pop(topic, None)
        return True

    # -- inside

    def _header(
        self, message: InnerMessage, topic: str, properties: dict[str, str], *, is_half: bool
    ) -> SendMessageV2Request:
        changes = dict.fromkeys(_OF_THIS_BROKER if is_half else (*_OF_THIS_BROKER, *_DUE))
        return SendMessageV2Request(
            producer_group=properties.get(property_names.PRODUCER_GROUP, f"escape_{self._settings.broker_name}"),
            topic=topic,
            default_topic=names.AUTO_CREATE_TOPIC,
            default_topic_queue_nums=self._settings.default_topic_queue_count,
            queue_id=0,
            # Send only the compression bits: the other broker recognizes a half message by TRAN_MSG.
            sys_flag=message.sys_flag & (COMPRESSED | COMPRESSION_MASK),
            born_timestamp=message.born_timestamp,
            flag=message.flag,
            properties=with_changes(message.properties, changes).decode("utf-8", "replace"),
            reconsume_times=message.reconsume_times,
            max_reconsume_times=message.reconsume_times,
        )

    async def _send(self, topic: str, header: SendMessageV2Request, body: bytes | memoryview) -> None:
        """Send a message. Raises NoRoute: no other broker's master has the topic. Raises RemotingError, PeerRefused."""
        queue = await self._queue(topic)
        assert queue.broker_name != self._settings.broker_name, "the queue is on another broker"
        header.queue_id, header.bname = queue.queue_id, queue.broker_name
        await self._calls.ask(queue.address, RequestCode.SEND_MESSAGE_V2, header, body=body)

    async def _queue(self, topic: str) -> _Queue:
        """Return the next queue of a topic, in rotation over the queues at other brokers' masters."""
        # Only one request at a time: messages that are due together share one request for the route of their topic.
        async with self._asking:
            known = self._queues.get(topic)
            now_ms = self._clock.monotonic_ms()
            if known is None or known[0] <= now_ms:
                routes = await self._registration.routes(topic)
                queues = list(dict.fromkeys(queue for route in routes for queue in self._queues_of_others(route)))
                until_ms = now_ms + (_ROUTE_MS_MAX if queues else _NO_ROUTE_MS_MAX)
                known = self._queues[topic] = (until_ms, itertools.cycle(queues))
        queue = next(known[1], None)
        if queue is None:
            raise NoRoute(f"no other broker's master accepts messages for topic {topic}: create it on another broker")
        return queue

    def _queues_of_others(self, route: TopicRoute) -> Iterator[_Queue]:
        masters = {broker.broker_name: broker.broker_addrs.get(0) for broker in route.broker_datas}
        for queues in route.queue_datas:
            address = masters.get(queues.broker_name)
            if address is None or queues.broker_name == self._settings.broker_name:
                continue
            if queues.perm & Permission.WRITE:
                for queue_id in range(queues.write_queue_nums):
                    yield _Queue(address, queues.broker_name, queue_id)

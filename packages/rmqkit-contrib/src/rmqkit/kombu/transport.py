"""The transport: kombu's queues are topics. All workers pop from the topics as members of one group.

======================  =========================================================================================
kombu and Celery        RocketMQ
======================  =========================================================================================
queue                   a topic with the same name; ``%`` and a code replace characters that topics may not have
publish                 a send; the task's id is the message's key
publish with an ETA     a timed message: the broker stores the message until the ETA, and no worker holds it. After
(``countdown``,         `DELAY_MS_MAX` a worker sends it again as a timed message, if the ETA is still later
``retry``)
receive                 a pop: other workers cannot get the message for ``visibility_timeout`` seconds
acknowledge             an ack; if a worker dies before the ack, the message is redelivered when its invisible time
                        has expired
reject, requeue,        the invisible time expires immediately, so that the next worker that pops gets the message
shutdown
reject, no requeue      an ack
purge                   pops and acks until the topic has no more messages
======================  =========================================================================================

Fanout is not supported. Celery therefore switches off remote control (``celery inspect``, ``celery control``), events
between workers and gossip, as it does for SQS. Each process stores its own bindings of exchanges to queues.

Options in ``broker_transport_options``:

======================  =========================================================================================
``visibility_timeout``  seconds, default 3600; longer than the longest task with ``acks_late``
``group``               the consumer group, default ``celery``
``name_servers``        ``host:port;host:port`` in place of the URL's host
``wait_seconds``        time that one pop waits for a message, default 1
======================  =========================================================================================

A URL with a user and a password signs every request with them: ``rocketmq://user:secret@host:9876//``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from queue import Empty
from typing import Any

from kombu.transport import virtual
from kombu.utils.json import dumps, loads
from kombu.utils.uuid import uuid

from rmqkit.client.runtime.settings import ProducerSettings, PushConsumerSettings, StartFrom
from rmqkit.clock import SYSTEM_CLOCK
from rmqkit.errors import ClientError, NoNameServer, NoRoute, RemotingError, SendFailed
from rmqkit.protocol.message import Message, ReceivedMessage
from rmqkit.remoting.authentication import Credentials
from rmqkit.sync import PopConsumer, Producer

__all__ = ["Channel", "Transport"]

DELAY_MS_MAX = 2 * 24 * 3_600_000
"""Maximum delay of a timed message here; brokers accept up to 3 days (``timerMaxDelaySec``)."""

_GROUP = "celery"
_VISIBILITY_SECONDS = 3600
_WAIT_SECONDS = 1.0
_BATCH_MAX = 32
_FULL_SECONDS = 0.05
_SOON_MS = 1000
_AT_ONCE_MS = 1
_TOPIC_CHARACTERS = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-")


def topic_of(queue: str) -> str:
    """Return the topic of a queue. Characters that are legal in a topic stay, and others become ``%`` and hexadecimal
    UTF-8 bytes."""
    return "".join(
        one if one in _TOPIC_CHARACTERS else "".join(f"%{byte:02X}" for byte in one.encode()) for one in queue
    )


class Channel(virtual.Channel):  # type: ignore[misc]
    """One channel, with its messages that are received and not acknowledged yet."""

    connection: Transport

    def __init__(self, connection: Transport, **options: Any) -> None:
        super().__init__(connection, **options)
        self._popped: dict[str, ReceivedMessage] = {}
        self._turn = 0

    # -- called by kombu

    def basic_consume(self, queue: str, no_ack: bool, *args: Any, **options: Any) -> Any:
        if no_ack:
            self.connection.no_ack_queues.add(queue)
        else:
            self.connection.no_ack_queues.discard(queue)
        return super().basic_consume(queue, no_ack, *args, **options)

    def basic_get(self, queue: str, no_ack: bool = False, **options: Any) -> Any:
        message = super().basic_get(queue, no_ack=no_ack, **options)
        if message is not None and no_ack:
            self._ack(message.delivery_tag)
        return message

    def basic_ack(self, delivery_tag: str, multiple: bool = False) -> None:
        self._ack(delivery_tag)
        super().basic_ack(delivery_tag, multiple)

    def basic_reject(self, delivery_tag: str, requeue: bool = False) -> None:
        if not requeue:
            self._ack(delivery_tag)
        super().basic_reject(delivery_tag, requeue=requeue)

    # -- called by the virtual channel

    def _put(self, queue: str, message: dict[str, Any], **options: Any) -> None:
        headers = message.get("headers") or {}
        task_id = headers.get("id")
        sent = Message(
            topic=topic_of(queue),
            body=dumps(message).encode(),
            keys=[task_id] if isinstance(task_id, str) and task_id and " " not in task_id else [],
        )
        due_ms, now_ms = _due_ms(headers), SYSTEM_CLOCK.now_ms()
        if due_ms > now_ms:
            sent.deliver_at = min(due_ms, now_ms + DELAY_MS_MAX) / 1000
        self.connection.producer.send(sent)

    def _get(self, queue: str, timeout: float | None = None) -> dict[str, Any]:
        for payload in self._pop(queue, 1, timeout or 0.0):
            return payload
        raise Empty

    def _get_many(self, queues: list[str], timeout: float | None = None) -> None:
        """Deliver the messages of the first queue that has messages. Each call starts at another queue, and waits for
        messages only at its last queue. Raises Empty."""
        count = min(_BATCH_MAX, self.qos.can_consume_max_estimate() or _BATCH_MAX)
        self._turn += 1
        start = self._turn % len(queues)
        in_turn = queues[start:] + queues[:start]
        wait_seconds = min(_WAIT_SECONDS if timeout is None else timeout, self.connection.wait_seconds)
        for queue in in_turn:
            payloads = self._pop(queue, count, wait_seconds if queue is in_turn[-1] else 0.0)
            for payload in payloads:
                self.connection._deliver(payload, queue)
                if queue in self.connection.no_ack_queues:
                    self._ack(payload["properties"]["delivery_tag"])
            if payloads:
                return
        raise Empty

    def _pop(self, queue: str, count: int, wait_seconds: float) -> list[dict[str, Any]]:
        consumer, invisible_time = self.connection.consumer, self.connection.visibility_ms / 1000
        try:
            popped = consumer.pop(topic_of(queue), max_count=count, invisible_time=invisible_time, wait=wait_seconds)
        except NoRoute:
            # The topic does not exist yet: brokers create it with its first message.
            time.sleep(wait_seconds)
            return []
        payloads = []
        for message in popped:
            payload = loads(message.body)
            if _due_ms(payload.get("headers") or {}) > SYSTEM_CLOCK.now_ms() + _SOON_MS:
                # The ETA is later than `DELAY_MS_MAX`, or the sender set no delivery time: send it as a timed message.
                self._put(queue, payload)
                consumer.ack(message)
                continue
            # Each delivery needs a unique tag, because a worker may receive a message twice.
            tag = payload["properties"]["delivery_tag"] = uuid()
            self._popped[tag] = message
            payloads.append(payload)
        return payloads

    def _restore(self, message: virtual.Message) -> None:
        """Make the broker redeliver a message immediately."""
        received = self._popped.pop(message.delivery_tag, None)
        if received is not None:
            self.connection.consumer.change_invisible_time(received, _AT_ONCE_MS)

    def _ack(self, delivery_tag: str) -> None:
        received = self._popped.pop(delivery_tag, None)
        if received is not None:
            self.connection.consumer.ack(received)

    def _purge(self, queue: str) -> int:
        count = 0
        while payloads := self._pop(queue, _BATCH_MAX, 0.0):
            for payload in payloads:
                self._ack(payload["properties"]["delivery_tag"])
            count += len(payloads)
        return count

    def _delete(self, queue: str, *args: Any, **options: Any) -> None:
        """Do nothing: other programs may use the topic."""


class Transport(virtual.Transport):  # type: ignore[misc]
    """kombu's transport for the scheme ``rocketmq``, with a producer and a consumer for each connection."""

    Channel = Channel

    default_port = 9876
    driver_type = driver_name = "rocketmq"
    # A pop waits at the broker, so a pause between two pops is not needed.
    polling_interval: float | None = None
    connection_errors = (*virtual.Transport.connection_errors, RemotingError, NoRoute, SendFailed)
    channel_errors = (*virtual.Transport.channel_errors, ClientError)
    implements = virtual.Transport.implements.extend(exchange_type=frozenset(["direct", "topic"]))

    def __init__(self, client: Any, **options: Any) -> None:
        super().__init__(client, **options)
        given = client.transport_options
        self.visibility_ms = round(given.get("visibility_timeout", _VISIBILITY_SECONDS) * 1000)
        self.wait_seconds: float = given.get("wait_seconds", _WAIT_SECONDS)
        self.no_ack_queues: set[str] = set()
        self._group: str = given.get("group", _GROUP)
        self._producer: Producer | None = None
        self._consumer: PopConsumer | None = None

    def driver_version(self) -> str:
        return version("rmqkit")

    def establish_connection(self) -> Any:
        """Check that a name server answers. Raises NoNameServer, after which kombu retries."""
        try:
            self.producer.queues(topic_of(self._group))
        except NoNameServer:
            self._close_clients()  # kombu closes only established connections
            raise
        except NoRoute:
            pass  # a name server has answered
        return super().establish_connection()

    def drain_events(self, connection: Any, timeout: float | None = None) -> None:
        """Deliver messages to the consumers.
        Raises TimeoutError: no message arrived in ``timeout`` seconds, or no channel can receive a message now. In
        the second case the wait is at most 50 ms: a worker acknowledges messages, which makes room, between two calls.
        """
        while not any(channel and channel._consumers and channel.qos.can_consume() for channel in self.channels):
            time.sleep(_FULL_SECONDS if timeout is None else min(timeout, _FULL_SECONDS))
            if timeout is not None:
                raise TimeoutError
        super().drain_events(connection, timeout)

    def close_connection(self, connection: Any) -> None:
        try:
            super().close_connection(connection)  # makes the broker redeliver unacknowledged messages
        finally:
            self._close_clients()

    def _close_clients(self) -> None:
        consumer, producer, self._consumer, self._producer = self._consumer, self._producer, None, None
        if consumer is not None:
            consumer.close()
        if producer is not None:
            producer.close()

    @property
    def producer(self) -> Producer:
        if self._producer is None:
            settings = ProducerSettings(auth=self.credentials)
            self._producer = _started(lambda: Producer(self._group, self.name_servers, settings=settings))
        return self._producer

    @property
    def consumer(self) -> PopConsumer:
        if self._consumer is None:
            first = StartFrom.FIRST_OFFSET  # includes tasks that were sent before the first worker started
            settings = PushConsumerSettings(start_from=first, auth=self.credentials)
            self._consumer = _started(lambda: PopConsumer(self._group, self.name_servers, settings=settings))
        return self._consumer

    @property
    def name_servers(self) -> str:
        given = self.client.transport_options.get("name_servers")
        return given or f"{self.client.hostname or '127.0.0.1'}:{self.client.port or self.default_port}"

    @property
    def credentials(self) -> Credentials | None:
        user, password = self.client.userid, self.client.password
        return Credentials(user, password) if user and password else None


def _started(make: Callable[[], Any]) -> Any:
    client = make()
    client.start()
    return client


def _due_ms(headers: dict[str, Any]) -> int:
    """Return the ETA of a task in ms since the epoch, or 0 if the task has no ETA. Celery's times without a zone are
    UTC."""
    eta = headers.get("eta")
    try:
        due = datetime.fromisoformat(eta) if isinstance(eta, str) else eta
    except ValueError:
        return 0  # Celery reports the error
    if not isinstance(due, datetime):
        return 0
    return round((due if due.tzinfo else due.replace(tzinfo=UTC)).timestamp() * 1000)

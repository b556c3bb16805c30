"""Request-reply: a message is sent and a consumer's reply to it awaited (``RequestFutureHolder``, ``MessageUtil``).

::

    request()   CORRELATION_ID, REPLY_TO_CLIENT = client id, TTL ──> topic ──> consumer
    the caller <── PUSH_REPLY_MESSAGE_TO_CLIENT ── broker <── <cluster>_REPLY_TOPIC, MSG_TYPE=reply ── reply()

The broker pushes a reply over the connection whose heartbeats have the client id; a reply that nobody waits for any
more is taken and dropped. Loop only. Source: behaviour.md §3.8, §7.10; remoting.md §4.3.7.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Iterator

from msgspec import Struct

from rmqkit.clock import Clock
from rmqkit.errors import BodyError, NotARequest
from rmqkit.protocol import properties as names
from rmqkit.protocol.codes import ResponseCode
from rmqkit.protocol.command import Command, decode_header, reply
from rmqkit.protocol.compression import decompress
from rmqkit.protocol.headers.send import PushReplyRequest
from rmqkit.protocol.message import ReceivedMessage
from rmqkit.protocol.properties import decode_properties
from rmqkit.remoting.connection import Connection

__all__ = ["PendingReplies", "Reply", "reply_address"]

_REPLY = "reply"
_log = logging.getLogger(__name__)


class Reply(Struct):
    """What a consumer replied.

    Attributes:
        body: decompressed.
        properties: the replier's own and those that brokers and clients gave it.
        born_timestamp: when it was sent, in ms since the epoch, by the replier's clock.
        born_host: the replier, ``ip:port``.
    """

    body: bytes
    properties: dict[str, str]
    flag: int
    born_timestamp: int
    born_host: str


class PendingReplies:
    """The requests of one client instance that wait for their replies."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._waiting: dict[str, asyncio.Future[Reply]] = {}

    @contextlib.contextmanager
    def expect(self, client_id: str, timeout_ms: float) -> Iterator[tuple[dict[str, str], asyncio.Future[Reply]]]:
        """The properties that make a message a request, and the reply to come; forgotten at the end."""
        correlation_id = str(uuid.uuid4())
        properties = {
            names.CORRELATION_ID: correlation_id,
            names.REPLY_TO_CLIENT: client_id,
            names.TIME_TO_LIVE: str(int(timeout_ms)),
        }
        future = asyncio.get_running_loop().create_future()
        self._waiting[correlation_id] = future
        try:
            yield properties, future
        finally:
            del self._waiting[correlation_id]

    def take(self, connection: Connection, command: Command) -> Command:
        """PUSH_REPLY_MESSAGE_TO_CLIENT: hand a reply to who waits for it."""
        header = decode_header(command, PushReplyRequest)
        properties = decode_properties((header.properties or "").encode("utf-8", "replace"))
        properties[names.ARRIVE_TIME] = str(self._clock.now_ms())
        try:
            body = decompress(command.payload, header.sys_flag)
        except BodyError as error:
            _log.warning("a reply from %s cannot be read: %s", header.born_host, error)
            return reply(command, ResponseCode.SYSTEM_ERROR, "process reply message fail")
        future = self._waiting.get(properties.get(names.CORRELATION_ID, ""))
        if future is None or future.done():
            _log.warning("a reply from %s came too late or twice, or was never asked for", header.born_host)
        else:
            future.set_result(Reply(body, properties, header.flag, header.born_timestamp, header.born_host))
        return reply(command)


def reply_address(request: ReceivedMessage) -> tuple[str, dict[str, str]]:
    """The topic a reply goes to, and the properties that lead it to who asked.
    Raises NotARequest: the message is none."""
    for name in (names.CLUSTER, names.CORRELATION_ID, names.REPLY_TO_CLIENT):
        if not request.properties.get(name):
            raise NotARequest(request.msg_id, name)
    copied = (names.CORRELATION_ID, names.REPLY_TO_CLIENT, names.TIME_TO_LIVE)
    properties = {name: request.properties[name] for name in copied if name in request.properties}
    return f"{request.properties[names.CLUSTER]}_REPLY_TOPIC", properties | {names.MESSAGE_TYPE: _REPLY}

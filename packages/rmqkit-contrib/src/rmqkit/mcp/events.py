"""The events of one MCP session, MCP's `EventStore`.

MCP has one stream of events for each request of a client, and one for messages that belong to no request. The SDK names
these streams by the id of the request, which clients count from 0. So the name of a stream here begins with the id of
its session, and a session reads only its own streams:

==============================  ====================================================================================
``<session>-<request id>``      the stream of a request; `stream_name` has the rule for unusual request ids
``<session>-_GET_stream``       messages that belong to no request
==============================  ====================================================================================

The id of an event is the event id of `rmqkit.streams`. The response is the last event of the stream of a request. A
priming event of the SDK, which has no message, is stored as ``null``, and is never sent again.

A replay follows its stream until the response is stored, so it does not matter which process handles the request.
If there is no such event, or later events have expired, the client gets an error as the answer to its request. A stream
without a request continues with new events. Nothing is replayed after an event of another session.

A crash of the process loses no event with an id. When no broker answers, events are delivered without an id.
"""

from __future__ import annotations

import logging
import re

import anyio
from mcp.server.streamable_http import (
    GET_STREAM_KEY,
    EventCallback,
    EventId,
    EventMessage,
    EventStore,
    StreamId,
)
from mcp_types import (
    CONNECTION_CLOSED,
    ErrorData,
    JSONRPCError,
    JSONRPCMessage,
    JSONRPCResponse,
    jsonrpc_message_adapter,
)

from rmqkit.errors import EventIdIllegal, MessageIllegal, PeerRefused, RmqError, SettingsError, StreamExpired
from rmqkit.streams import Event, Streams, stream_name

__all__ = ["SessionEvents", "is_session_id"]

logger = logging.getLogger(__name__)

_SESSION_ID = re.compile(r"[a-zA-Z0-9_]{1,32}", re.ASCII)
_PRIMING = b"null"


class SessionEvents(EventStore):
    """The event store of one session, for the SDK's `StreamableHTTPServerTransport`. `SessionManager` creates one for
    each session.

    Args:
        streams: open streams.
        session_id: the id of the session: 1 to 32 letters, digits and ``_``.
        single_process: True: no other process serves this session. A request that a former process did not answer is
            answered with an error when the client resumes its stream. False: its stream waits for the response.

    Raises SettingsError: the session id is not allowed.
    """

    def __init__(self, streams: Streams, session_id: str, *, single_process: bool = False) -> None:
        if not is_session_id(session_id):
            raise SettingsError(f"session id {session_id!r} must have 1 to 32 letters, digits and _")
        self.session_id = session_id
        self._streams = streams
        self._single_process = single_process
        self._prefix = f"{session_id}-"
        self._running: set[str] = set()
        self._replays: set[anyio.CancelScope] = set()
        self._is_failing = False

    async def store_event(self, stream_id: StreamId, message: JSONRPCMessage | None) -> EventId:
        """Store an event of a stream. Return its id, or an empty text if it could not be stored."""
        stream = self._name(stream_id)
        is_response = stream_id != GET_STREAM_KEY and isinstance(message, JSONRPCResponse | JSONRPCError)
        self._running.add(stream)
        try:
            event_id = await self._streams.append(stream, _data(message), last=is_response)
        except (MessageIllegal, PeerRefused) as error:
            self._report(stream, error)
            event_id = (
                await self._append_failure(stream, f"the response was not stored: {error}") if is_response else ""
            )
        except RmqError as error:
            self._report(stream, error)
            event_id = ""
        else:
            self._is_failing = False
        if is_response or stream_id == GET_STREAM_KEY:
            self._running.discard(stream)
        return event_id

    async def replay_events_after(self, last_event_id: EventId, send_callback: EventCallback) -> StreamId | None:
        """Send the events after an event of this session, then new ones, up to the response. Return None at the end:
        the transport has nothing to add."""
        stream = last_event_id.rpartition(".")[2]
        if not stream.startswith(self._prefix):
            logger.warning("session %s: no replay after event id %.100r of another session", self.session_id, stream)
            return None
        with anyio.CancelScope() as scope:
            self._replays.add(scope)
            try:
                await self._replay(stream, last_event_id, send_callback)
            finally:
                self._replays.discard(scope)
        return None

    def close(self) -> None:
        """Stop all replays."""
        for scope in tuple(self._replays):
            scope.cancel()

    async def _replay(self, stream: str, last_event_id: EventId, send: EventCallback) -> None:
        """Send the events of a stream of this session after an event."""
        try:
            if self._single_process:
                await self._end_lost_request(stream)
            await self._send_all(stream, last_event_id, send)
        except MessageIllegal:
            logger.warning(
                "session %s: no replay after %.100r, this is not an event id", self.session_id, last_event_id
            )
        except (EventIdIllegal, StreamExpired) as error:
            logger.warning("session %s: %s", self.session_id, error)
            if stream == self._name(GET_STREAM_KEY):
                await self._send_all(stream, None, send)
            else:
                await send(EventMessage(_failure(str(error))))

    async def _send_all(self, stream: str, after: str | None, send: EventCallback) -> None:
        """Send the events of a stream after an event. ``after`` None: send new events."""
        async for event in self._streams.read(stream, after=after, new=after is None):
            if event.data != _PRIMING:
                await send(_message(event))

    async def _end_lost_request(self, stream: str) -> None:
        """Answer the request of a stream with an error, if it ran in a former process and has no response."""
        if stream in self._running or stream == self._name(GET_STREAM_KEY):
            return
        newest = await self._streams.last(stream)
        if newest is not None and not newest.is_last:
            await self._append_failure(stream, "the server was restarted before it answered the request")

    async def _append_failure(self, stream: str, why: str) -> EventId:
        """Store an error as the response of a request. Return its id, or an empty text if it could not be stored."""
        try:
            return await self._streams.append(stream, _data(_failure(why)), last=True)
        except RmqError as error:
            self._report(stream, error)
            return ""

    def _report(self, stream: str, error: RmqError) -> None:
        """Log the first of a series of failures."""
        if not self._is_failing:
            logger.warning("stream %s: an event was not stored and cannot be replayed: %s", stream, error)
        self._is_failing = True

    def _name(self, stream_id: StreamId) -> str:
        """Return the name of a stream of this session."""
        return stream_name(stream_id, prefix=self._prefix)


def is_session_id(text: str) -> bool:
    """Return True if a text can be the id of a session."""
    return _SESSION_ID.fullmatch(text) is not None


def _data(message: JSONRPCMessage | None) -> bytes:
    """Return the content of an event."""
    return _PRIMING if message is None else message.model_dump_json(by_alias=True, exclude_unset=True).encode()


def _message(event: Event) -> EventMessage:
    """Return the message of an event."""
    return EventMessage(jsonrpc_message_adapter.validate_json(event.data, by_name=False), event.id)


def _failure(why: str) -> JSONRPCError:
    """Return an error that ends the request of a stream. Clients put the id of their request into it."""
    return JSONRPCError(jsonrpc="2.0", id=None, error=ErrorData(code=CONNECTION_CLOSED, message=why))

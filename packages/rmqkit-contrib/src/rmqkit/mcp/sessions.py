"""Sessions of MCP that every process of a server can continue.

The SDK's session manager holds its sessions in memory, and answers 404 for a session that it does not know. This
manager stores each session in a stream with the session's name. A record has the parameters of the client's
``initialize`` request and the identity of the user who sent it:

::

    {"owner": null, "initialize": {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {...}}}

==============================  ====================================================================================
the session is opened           its record is stored before the client gets its id
a request arrives               the record is stored again if it is older than 30 s, so that the session does not expire
a request of an unknown         the record is read. If it has the same owner, the session is opened with the same id,
session arrives                 as if the client had sent its ``initialize`` request here. Otherwise the answer is 404
the client deletes the session  the stream is finished: no process continues it
a session is idle, or the       the record stays
process stops
==============================  ====================================================================================

A request that runs while its process is killed is not repeated: the tool decides about repeating it. See
`SessionEvents` for its stream.
"""

from __future__ import annotations

import logging
from typing import Any, cast

import anyio
import msgspec
from anyio.abc import TaskGroup, TaskStatus
from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser, AuthorizationContext, authorization_context
from mcp.server.connection import Connection
from mcp.server.lowlevel.server import Server
from mcp.server.runner import ServerRunner, serve_connection
from mcp.server.streamable_http import MCP_SESSION_ID_HEADER, StreamableHTTPServerTransport
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.shared.jsonrpc_dispatcher import JSONRPCDispatcher
from mcp.shared.transport_context import TransportContext
from mcp_types import INTERNAL_ERROR, ErrorData, InitializeRequestParams, JSONRPCError
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from rmqkit.errors import RmqError, SettingsError
from rmqkit.mcp.events import SessionEvents, is_session_id
from rmqkit.streams import Streams

__all__ = ["SessionManager"]

logger = logging.getLogger(__name__)

_OPENING_BYTES_MAX = 64 << 10
"""A larger ``initialize`` request is not stored. Usual ones have some hundred bytes."""
_RENEWAL_SECONDS = 30.0
"""Half of the shortest lifetime of a stream."""
_STREAMS_SECONDS = 10.0
"""How long a request waits for the record of its session."""


class _Record(msgspec.Struct):
    owner: dict[str, Any] | None
    initialize: dict[str, Any]


class _Session(msgspec.Struct):
    """A session of this process. ``record``: its stored record, empty until it is known."""

    events: SessionEvents
    record: bytes = b""
    renew_at: float = 0.0


class SessionManager(StreamableHTTPSessionManager):
    """The SDK's `StreamableHTTPSessionManager`, with sessions and events in streams.

    Args:
        app: the low-level server of the SDK.
        streams: open streams.
        single_process: True: this is the only process that serves the sessions, see `SessionEvents`.
        options: further options of `StreamableHTTPSessionManager`, except ``event_store`` and ``stateless``.

    Raises SettingsError: an option is not possible here."""

    def __init__(self, app: Server[Any], streams: Streams, *, single_process: bool = False, **options: Any) -> None:
        super().__init__(app, **options)
        if self.event_store is not None or self.stateless:
            raise SettingsError("event_store and stateless are not possible: the streams store the events of sessions")
        self._streams = streams
        self._single_process = single_process
        self._sessions: dict[str, _Session] = {}
        self._adopting: dict[str, anyio.Lock] = {}

    def _admit_session(self, requestor: AuthorizationContext | None) -> StreamableHTTPServerTransport | None:
        transport = super()._admit_session(requestor)
        if transport is not None:
            self._attach(transport)
        return transport

    async def _serve_opening_request(
        self, http_transport: StreamableHTTPServerTransport, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Serve an ``initialize`` request. Store the record of the session before the client gets its id."""
        body = bytearray()
        session_id = http_transport.mcp_session_id or ""

        async def receive_and_copy() -> Message:
            message = await receive()
            if len(body) <= _OPENING_BYTES_MAX:
                body.extend(message.get("body", b""))
            return message

        async def store_and_send(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] < 400:
                await self._store(session_id, bytes(body))
            await send(message)

        await super()._serve_opening_request(http_transport, scope, receive_and_copy, store_and_send)

    async def _handle_stateful_request(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope)
        session_id = request.headers.get(MCP_SESSION_ID_HEADER, "")
        if is_session_id(session_id) and session_id not in self._server_instances:
            refusal = await self._adopt(session_id, _requestor(scope))
            if refusal is not None:
                await refusal(scope, receive, send)
                return
        session = self._sessions.get(session_id)
        if session is not None and request.method != "DELETE":
            await self._renew(session_id, session)
        await super()._handle_stateful_request(scope, receive, send)
        if session is not None and request.method == "DELETE" and session_id not in self._server_instances:
            await self._finish(session_id)

    async def _discard_session(self, session_id: str, transport: StreamableHTTPServerTransport) -> None:
        """Forget a session. The SDK calls this more than once, possibly after the session was opened again."""
        if self._server_instances.get(session_id, transport) is transport:
            session = self._sessions.pop(session_id, None)
            if session is not None:
                session.events.close()
            await super()._discard_session(session_id, transport)

    def _attach(self, transport: StreamableHTTPServerTransport) -> _Session:
        """Give a transport the event store of its session. The SDK passes the same store to all sessions."""
        session_id = transport.mcp_session_id
        assert session_id is not None, "a transport of this manager has a session"
        events = SessionEvents(self._streams, session_id, single_process=self._single_process)
        transport._event_store = events
        self._sessions[session_id] = session = _Session(events)
        return session

    async def _store(self, session_id: str, body: bytes) -> None:
        """Store the record of a new session. Log a failure: the session works, but only in this process."""
        session = self._sessions.get(session_id)
        initialize = _initialize_params(body)
        if session is None or initialize is None:
            return
        owner = self._session_owners.get(session_id)
        session.record = msgspec.json.encode(_Record(None if owner is None else dict(owner), initialize))
        await self._renew(session_id, session)

    async def _renew(self, session_id: str, session: _Session) -> None:
        """Store the record of a session, if it was not stored within the last half minute."""
        now = anyio.current_time()
        if not session.record or now < session.renew_at:
            return
        session.renew_at = now + _RENEWAL_SECONDS
        try:
            await self._streams.append(session_id, session.record)
        except RmqError as error:
            logger.warning("session %s was not stored, other processes cannot continue it: %s", session_id, error)

    async def _finish(self, session_id: str) -> None:
        """Finish the stream of a deleted session."""
        try:
            await self._streams.finish(session_id)
        except RmqError as error:
            logger.warning("the end of session %s was not stored: %s", session_id, error)

    async def _adopt(self, session_id: str, requestor: AuthorizationContext | None) -> Response | None:
        """Open a session of another process here, if it is stored and has this owner. Return an answer if the session
        cannot be opened now."""
        async with self._adopting.setdefault(session_id, anyio.Lock()):
            try:
                if session_id in self._server_instances:
                    return None
                with anyio.fail_after(_STREAMS_SECONDS):
                    newest = await self._streams.last(session_id)
                if newest is None or newest.is_last:
                    return None
                return await self._open(session_id, newest.data, requestor)
            except RmqError as error:
                logger.warning("session %s could not be read: %s", session_id, error)
            except TimeoutError:
                logger.warning("session %s could not be read in %g s: no broker answers", session_id, _STREAMS_SECONDS)
            finally:
                self._adopting.pop(session_id, None)
        return _unavailable("the session could not be read")

    async def _open(self, session_id: str, data: bytes, requestor: AuthorizationContext | None) -> Response | None:
        """Open a session with its record, unless it has another owner. Return an answer if there is no room."""
        try:
            record = msgspec.json.decode(data, type=_Record)
            params, version = ServerRunner._negotiate_initialize(record.initialize)
        except (msgspec.MsgspecError, ValueError) as error:
            logger.warning("session %s has no readable record: %s", session_id, error)
            return None
        if record.owner != (None if requestor is None else dict(requestor)):
            logger.warning("session %s was requested with a credential of another user", session_id)
            return None
        if self.max_sessions is not None and len(self._server_instances) >= self.max_sessions:
            return _unavailable("too many open sessions")
        transport = StreamableHTTPServerTransport(
            mcp_session_id=session_id,
            is_json_response_enabled=self.json_response,
            security_settings=self.security_settings,
            retry_interval=self.retry_interval,
            idle_timeout=self.session_idle_timeout,
        )
        await cast("TaskGroup", self._task_group).start(self._serve, transport, params, version)
        self._attach(transport).record = data
        if requestor is not None:
            self._session_owners[session_id] = requestor
        self._server_instances[session_id] = transport
        logger.info("session %s continues in this process", session_id)
        return None

    async def _serve(
        self,
        transport: StreamableHTTPServerTransport,
        params: InitializeRequestParams,
        version: str,
        *,
        task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED,
    ) -> None:
        """Serve a stored session until it is deleted, idle for too long, or the manager stops."""
        session_id = transport.mcp_session_id or ""
        try:
            async with transport.connect() as (read_stream, write_stream):
                task_status.started()
                with transport.idle_scope or anyio.CancelScope():
                    dispatcher: JSONRPCDispatcher[TransportContext] = JSONRPCDispatcher(
                        read_stream, write_stream, inline_methods=frozenset({"initialize"})
                    )
                    connection = Connection.for_loop(dispatcher, session_id=session_id)
                    connection.client_params, connection.protocol_version = params, version
                    connection.initialized.set()
                    await serve_connection(
                        self.app, dispatcher, connection=connection, lifespan_state=self._lifespan_state
                    )
        except Exception:
            logger.exception("session %s failed", session_id)
        finally:
            await self._discard_session(session_id, transport)


def _initialize_params(body: bytes) -> dict[str, Any] | None:
    """Return the parameters of an ``initialize`` request, or None if it is too large or not readable."""
    if len(body) > _OPENING_BYTES_MAX:
        logger.warning("an initialize request of more than %d bytes: its session is not stored", _OPENING_BYTES_MAX)
        return None
    try:
        params = msgspec.json.decode(body, type=dict[str, Any]).get("params")
    except msgspec.MsgspecError:
        return None
    return params if isinstance(params, dict) else None


def _requestor(scope: Scope) -> AuthorizationContext | None:
    """Return the identity of the user who sent a request, as the SDK compares it."""
    user = scope.get("user")
    return authorization_context(user) if isinstance(user, AuthenticatedUser) else None


def _unavailable(why: str) -> Response:
    """Return an answer after which the client may try again."""
    body = JSONRPCError(jsonrpc="2.0", id=None, error=ErrorData(code=INTERNAL_ERROR, message=why))
    return Response(body.model_dump_json(exclude_unset=True), status_code=503, media_type="application/json")

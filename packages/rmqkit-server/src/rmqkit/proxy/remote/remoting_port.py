"""The proxy's remoting port, which clients of 4.x and 5.x use as their name server and as every broker
(``RemotingProtocolServer``).

A route (105) contains the proxy's own address for every broker. The proxy passes a client's requests to brokers over
separate connections, one for each broker that the client uses. Thus brokers see the client itself: its signatures, its
groups, its locks, its held requests, and its disconnect. Notices and requests of brokers are passed back the same way.
The proxy stores no groups.

============================  =====================================================================================
request                       receiver
============================  =====================================================================================
most (`_NAMED`)               the broker in the field ``bname`` (``n`` in the short form of sends); without this field,
                              as from clients of 4.x, the only broker
41, 42, 46, 400, 200151       the broker in the body, or a broker that has the topic in the body
34, 35                        all brokers that the client uses: the brokers of its routes and of its subscriptions
38, 203, 204                  the same; if the client uses no broker, all brokers. Members are merged
105                           no broker: the answer comes from the name servers, and is cached
============================  =====================================================================================

The newest heartbeat of a client is stored and sent first over each new connection: a restarted broker knows the client
again before it gets other requests. Requests are passed on unchanged, including signatures. A proxy with users checks
them first, so it never allows more than the brokers.

The limits are: pending requests per client (`CALLS_MAX`), in total (two `Lane` limits) and in bytes; unsent bytes of a
client to a broker; stored heartbeats; and the time of a broker's answer, after which the connection to the broker is
closed. Use this module only on the event loop. Source: grpc.md §11; remoting.md §4.2, §4.3, §4.5.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from copy import copy
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from rmqkit.errors import ConnectFailed, HeaderError, PeerRefused, ProtocolError, RemotingError
from rmqkit.protocol import fastjson
from rmqkit.protocol.codes import RequestCode, ResponseCode, version_number
from rmqkit.protocol.command import Command, decode_fields, decode_header, reply, request
from rmqkit.protocol.record import Record, decode_record
from rmqkit.protocol.schemas.clients import CheckClientBody, ConsumerIds, HeartbeatData, LockBody
from rmqkit.protocol.schemas.pop import BatchAckBody, QueryAssignmentBody
from rmqkit.protocol.schemas.pull import ViewMessageRequest
from rmqkit.protocol.schemas.topics import RouteRequest, TopicRoute
from rmqkit.proxy.backend import ASK_TIMEOUT_MS
from rmqkit.proxy.remote.remote_backend import RemoteBackend
from rmqkit.proxy.schema.status import Refused
from rmqkit.proxy.service.clients import CALLS_MAX
from rmqkit.proxy.service.receiving import no_route
from rmqkit.remoting.address import join_address
from rmqkit.remoting.client import RemotingClient
from rmqkit.remoting.connection import Connection
from rmqkit.remoting.router import LANE_REQUESTS_MAX, OVERLOADED, Lane, Router, decode_body
from rmqkit.remoting.tasks import Tasks
from rmqkit.rights import NotReadable, needed

__all__ = ["RemotingPort"]

# The field that names the broker.
_NAMED = {
    RequestCode.SEND_MESSAGE: "bname",
    RequestCode.SEND_MESSAGE_V2: "n",
    RequestCode.SEND_BATCH_MESSAGE: "n",
    RequestCode.SEND_REPLY_MESSAGE: "bname",
    RequestCode.SEND_REPLY_MESSAGE_V2: "n",
    RequestCode.CONSUMER_SEND_MSG_BACK: "bname",
    RequestCode.END_TRANSACTION: "bname",
    RequestCode.RECALL_MESSAGE: "bname",
    RequestCode.PULL_MESSAGE: "bname",
    RequestCode.LITE_PULL_MESSAGE: "bname",
    RequestCode.QUERY_CONSUMER_OFFSET: "bname",
    RequestCode.UPDATE_CONSUMER_OFFSET: "bname",
    RequestCode.SEARCH_OFFSET_BY_TIMESTAMP: "bname",
    RequestCode.GET_MAX_OFFSET: "bname",
    RequestCode.GET_MIN_OFFSET: "bname",
    RequestCode.GET_EARLIEST_MSG_STORETIME: "bname",
    RequestCode.POP_MESSAGE: "bname",
    RequestCode.ACK_MESSAGE: "bname",
    RequestCode.CHANGE_MESSAGE_INVISIBLETIME: "bname",
    RequestCode.NOTIFICATION: "bname",
}
# The field with the time for which a broker may hold a request, in ms.
_HOLDS = {
    RequestCode.PULL_MESSAGE: "suspendTimeoutMillis",
    RequestCode.LITE_PULL_MESSAGE: "suspendTimeoutMillis",
    RequestCode.POP_MESSAGE: "pollTime",
    RequestCode.NOTIFICATION: "pollTime",
}
# Notices and requests of brokers to clients.
_FROM_BROKERS = (
    RequestCode.CHECK_TRANSACTION_STATE,
    RequestCode.NOTIFY_CONSUMER_IDS_CHANGED,
    RequestCode.RESET_CONSUMER_CLIENT_OFFSET,
    RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT,
    RequestCode.GET_CONSUMER_RUNNING_INFO,
    RequestCode.CONSUME_MESSAGE_DIRECTLY,
    RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT,
)
# The field with the physical offset of the message that a request names. Policies are checked for the topic of this
# message.
_PLACES = {RequestCode.END_TRANSACTION: "commitLogOffset", RequestCode.CONSUMER_SEND_MSG_BACK: "offset"}

_ANSWER_MS = 3000.0
_AFTER_HOLD_MS = 10_000.0
_HOLD_MS_MAX = 300_000.0
_CLIENT_ANSWER_MS = 10_000.0
_HELD_MAX = 50_000
_REQUESTS_BYTES_MAX = 256 << 20
_HEARTBEATS_BYTES_MAX = 64 << 20
_HEARTBEAT_BYTES_MAX = 64 << 10
_STRICT_JSON_SINCE = version_number(4, 9, 4)
_SUB_CHANGE = "IS_SUB_CHANGE"

T = TypeVar("T")
_log = logging.getLogger(__name__)


class _Client:
    """A connection of a client.

    Attributes:
        remoting: the client's connections to brokers.
        brokers: the names of the brokers that the client uses.
        heartbeat: the newest heartbeat with subscriptions, or None.
        calls: number of pending requests.
    """

    def __init__(self, connection: Connection, remoting: RemotingClient) -> None:
        self.connection = connection
        self.remoting = remoting
        self.brokers: set[str] = set()
        self.heartbeat: Command | None = None
        self.calls = 0


class RemotingPort:
    """Answers the requests of remoting clients.

    Args:
        backend: provides routes, brokers and users.
        remoting: returns the connections of one client to brokers. The router handles the brokers' requests. The
            connections do not sign requests.
        host: the host in routes; empty: the host that the client connected to.
        port: the port in routes; can be set later.

    Attributes:
        router: the handlers.
    """

    def __init__(
        self, backend: RemoteBackend, remoting: Callable[[Router], RemotingClient], *, host: str = "", port: int = 0
    ) -> None:
        self._backend = backend
        self._remoting = remoting
        self._host = host
        self.port = port
        self._clients: dict[Connection, _Client] = {}
        self._heartbeat_bytes = 0
        self._request_bytes = 0
        self._tasks = Tasks()
        self.router = Router()
        lane, held = Lane("proxied", LANE_REQUESTS_MAX), Lane("held", _HELD_MAX)
        for code in _NAMED:
            self.router.register(code, self._answering(self._by_name), held if code in _HOLDS else lane)
        for code, answer in {
            RequestCode.GET_ROUTEINFO_BY_TOPIC: self._route,
            RequestCode.HEART_BEAT: self._heartbeat,
            RequestCode.UNREGISTER_CLIENT: self._unregister,
            RequestCode.GET_CONSUMER_LIST_BY_GROUP: self._members,
            RequestCode.GET_CONSUMER_CONNECTION_LIST: self._connections,
            RequestCode.GET_PRODUCER_CONNECTION_LIST: self._connections,
            RequestCode.LOCK_BATCH_MQ: self._locks,
            RequestCode.UNLOCK_BATCH_MQ: self._locks,
            RequestCode.CHECK_CLIENT_CONFIG: self._check,
            RequestCode.QUERY_ASSIGNMENT: self._assignment,
            RequestCode.BATCH_ACK_MESSAGE: self._batch_ack,
        }.items():
            self.router.register(code, self._answering(answer), lane)

    def closed(self, connection: Connection) -> None:
        """Close a disconnected client's connections to brokers. Thus the brokers see that the client has left."""
        client = self._clients.get(connection)
        if client is not None:
            self._keep(client, None)
            del self._clients[connection]
            self._tasks.start(client.remoting.close(), f"connections of {connection.peer}")

    async def close(self) -> None:
        """Close the connections to brokers."""
        for connection in list(self._clients):
            self.closed(connection)
        await self._tasks.finish()

    # -- the path of a request

    def _answering(
        self, answer: Callable[[_Client, Command], Awaitable[Command | None]]
    ) -> Callable[[Connection, Command], Awaitable[Command | None]]:
        async def handle(connection: Connection, command: Command) -> Command | None:
            if not connection.is_open:
                return None
            client = self._clients.get(connection)
            if client is None:
                client = self._clients[connection] = self._joined(connection)
            size = len(command.body)
            if client.calls >= CALLS_MAX or self._request_bytes + size > _REQUESTS_BYTES_MAX:
                return reply(command, ResponseCode.SYSTEM_BUSY, OVERLOADED)
            # Count the request before it is admitted: even an unauthenticated client causes work, because the proxy
            # requests its user from a broker.
            client.calls += 1
            self._request_bytes += size
            try:
                await self._admit(connection, command)
                return await answer(client, command)
            except Refused as error:
                return reply(command, ResponseCode.NO_PERMISSION, error.text)
            except RemotingError as error:
                _log.info("request %s of %s: %s", command.code, connection.peer, error)
                return reply(command, ResponseCode.SYSTEM_ERROR, str(error))
            finally:
                client.calls -= 1
                self._request_bytes -= size
                assert client.calls >= 0 <= self._request_bytes, "every finished request was counted"

        return handle

    def _joined(self, connection: Connection) -> _Client:
        router = Router()
        for code in _FROM_BROKERS:
            router.register(code, lambda _, command: self._tell(connection, command))
        return _Client(connection, self._remoting(router))

    async def _admit(self, connection: Connection, command: Command) -> None:
        """Check a request. Raises Refused: no known user signed it, or policies do not allow it."""
        backend = self._backend
        user = await backend.users.sender(command)
        if not backend.has_policies:
            return
        record = await self._record_of(command) if command.code in _PLACES else None
        fields = decode_fields(command)
        try:
            wanted = list(needed(command, fields, "", lambda _: record))
        except NotReadable:
            raise PeerRefused(ResponseCode.NO_PERMISSION, "parse authorization context error.", "here") from None
        if command.code == RequestCode.GET_ROUTEINFO_BY_TOPIC:
            wanted = [(f"Topic:{fields.get('topic')}", frozenset(("Pub", "Sub", "Get")))]
        await backend.authorize(user, wanted, connection.addresses)

    async def _record_of(self, command: Command) -> Record | None:
        """Return the record at the log offset that a request names, or None."""
        broker = await self._broker(command)
        if broker is None:
            return None
        try:
            header = ViewMessageRequest(int(decode_fields(command)[_PLACES[RequestCode(command.code)]]))
            asked = request(RequestCode.VIEW_MESSAGE_BY_ID, header)
            answer = await self._backend.call(broker, asked, ASK_TIMEOUT_MS)
            return decode_record(answer.payload) if answer.code == ResponseCode.SUCCESS else None
        except (KeyError, ValueError, ProtocolError):
            return None  # the request's handler refuses it

    @staticmethod
    def _tell(connection: Connection, command: Command) -> Awaitable[Command] | None:
        """Pass a broker's notice or request to the client. Drop notices if the client does not read: brokers repeat
        notices."""
        if command.is_one_way:
            if connection.is_writable:
                connection.send(copy(command))
            return None

        async def ask() -> Command:
            try:
                answer = await connection.call(copy(command), _CLIENT_ANSWER_MS)
            except RemotingError as error:
                return reply(command, ResponseCode.SYSTEM_ERROR, str(error))
            answer.opaque = command.opaque
            return answer

        return ask()

    async def _pass(self, client: _Client, broker: str, command: Command) -> Command | None:
        """Pass a request to a broker, and return the answer; None for a one-way request.
        Raises RemotingError; PeerRefused: the broker does not exist."""
        address = await self._backend.master(broker)
        if address is None:
            raise PeerRefused(ResponseCode.SYSTEM_ERROR, f"broker {broker} is not known", "the name servers")
        timeout_ms = _ANSWER_MS
        if command.code in _HOLDS:
            timeout_ms = _AFTER_HOLD_MS + _milliseconds(decode_fields(command).get(_HOLDS[RequestCode(command.code)]))
        # Add the broker before connecting: if the client unregisters meanwhile, this broker must be notified, too.
        client.brokers.add(broker)
        try:
            connection = client.remoting.connected(address)
            if connection is None:
                connection = await client.remoting.connection(address)
                if client.heartbeat is not None and command.code != RequestCode.HEART_BEAT:
                    await client.remoting.call(address, copy(client.heartbeat), _ANSWER_MS)
            if not connection.is_writable:
                return reply(command, ResponseCode.SYSTEM_BUSY, f"broker {broker} accepts no more requests now")
            if command.is_one_way:
                await client.remoting.send_one_way(address, copy(command), _ANSWER_MS)
                return None
            # Send a copy: the connection sets its own opaque, and the answer needs the client's opaque.
            answer = await client.remoting.call(address, copy(command), timeout_ms)
        except ConnectFailed:
            if client.connection.is_open:
                self._backend.not_reached(broker)
            raise
        answer.opaque = command.opaque
        return answer

    async def _pass_to_all(self, client: _Client, brokers: Iterable[str], command: Command) -> list[Command]:
        """Pass a request to brokers, and return their answers, successful answers first.
        Raises RemotingError: no broker answers."""
        outcomes = await asyncio.gather(*(self._pass(client, one, command) for one in brokers), return_exceptions=True)
        answers: list[Command] = []
        failure: RemotingError | None = None
        for outcome in outcomes:
            if isinstance(outcome, Command):
                answers.append(outcome)
            elif isinstance(outcome, RemotingError):
                failure = outcome
            elif isinstance(outcome, BaseException) and not isinstance(outcome, PeerRefused):
                raise outcome
        if not answers and failure is not None:
            raise failure
        return sorted(answers, key=lambda answer: answer.code != ResponseCode.SUCCESS)

    # -- requests by code

    async def _by_name(self, client: _Client, command: Command) -> Command | None:
        broker = await self._broker(command)
        if broker is None:
            return reply(command, ResponseCode.VERSION_NOT_SUPPORTED, "Request doesn't have field bname")
        return await self._pass(client, broker, command)

    async def _route(self, client: _Client, command: Command) -> Command:
        header = decode_header(command, RouteRequest)
        route = await self._backend.topic(header.topic)
        if route is None:
            return reply(command, ResponseCode.TOPIC_NOT_EXIST, no_route(header.topic))
        own = join_address(self._host or client.connection.own_host, self.port)
        # Heartbeats are sent to the brokers of a client's routes, as if the client connected to them itself.
        client.brokers |= _masters_of(route)
        brokers = [replace(data, broker_addrs=dict.fromkeys(data.broker_addrs, own)) for data in route.broker_datas]
        rewritten = replace(route, broker_datas=brokers)
        is_strict = command.version >= _STRICT_JSON_SINCE or header.accept_standard_json_only
        return reply(command, body=msgspec.json.encode(rewritten) if is_strict else fastjson.dumps(rewritten))

    async def _heartbeat(self, client: _Client, command: Command) -> Command:
        data = decode_body(command, HeartbeatData)
        if not data.withoutSub:
            self._keep(client, command)
        topics = {wanted.topic for one in data.consumerDataSet for wanted in one.subscription_data_set}
        for topic in topics:
            client.brokers |= await self._brokers_of(topic)
        answers = await self._pass_to_all(client, client.brokers, command)
        refused = [answer for answer in answers if answer.code != ResponseCode.SUCCESS]
        # The client must send its subscriptions again if at least one broker does not have them.
        asking = [one for one in answers if decode_fields(one).get(_SUB_CHANGE) == "true"]
        # A refusal takes precedence: after a success the client would assume that all brokers have its heartbeat.
        return (refused or asking or answers or [reply(command)])[0]

    async def _unregister(self, client: _Client, command: Command) -> Command:
        # The stored heartbeat contains the groups that the client leaves. The next heartbeat is complete again.
        self._keep(client, None)
        answers = await self._pass_to_all(client, client.brokers, command)
        return (answers or [reply(command)])[-1]

    async def _members(self, client: _Client, command: Command) -> Command:
        answers = await self._pass_to_all(client, client.brokers or await self._backend.brokers(), command)
        if not answers or answers[0].code != ResponseCode.SUCCESS:
            return (answers or [reply(command, ResponseCode.SYSTEM_ERROR, "no broker knows the group")])[0]
        found = [one for one in answers if one.code == ResponseCode.SUCCESS]
        ids = dict.fromkeys(name for one in found for name in decode_body(one, ConsumerIds).consumer_id_list)
        return reply(command, body=msgspec.json.encode(ConsumerIds(list(ids))))

    async def _connections(self, client: _Client, command: Command) -> Command:
        answers = await self._pass_to_all(client, client.brokers or await self._backend.brokers(), command)
        return (answers or [reply(command, ResponseCode.SYSTEM_ERROR, "no broker is known")])[0]

    async def _locks(self, client: _Client, command: Command) -> Command | None:
        names = {queue.broker_name for queue in decode_body(command, LockBody).queues}
        return await self._pass(client, _only(names, "queues of one broker"), command)

    async def _check(self, client: _Client, command: Command) -> Command | None:
        wanted = decode_body(command, CheckClientBody).subscription_data
        names = set() if wanted is None else await self._brokers_of(wanted.topic)
        return await self._pass(client, min(names), command) if names else reply(command)

    async def _assignment(self, client: _Client, command: Command) -> Command | None:
        topic = decode_body(command, QueryAssignmentBody).topic
        names = await self._brokers_of(topic)
        if not names:
            return reply(command, ResponseCode.TOPIC_NOT_EXIST, no_route(topic))
        # A broker assigns queues to the members that it knows: choose a broker that has the client's heartbeat.
        return await self._pass(client, min(names & client.brokers or names), command)

    async def _batch_ack(self, client: _Client, command: Command) -> Command | None:
        broker = decode_body(command, BatchAckBody).broker_name
        return await self._pass(client, _only({broker} if broker else set(), "a broker's name"), command)

    # -- inside

    async def _broker(self, command: Command) -> str | None:
        """Return the broker that a request names. Clients of 4.x name no broker: for them, return the only broker, or
        None if there is not exactly one broker."""
        named = decode_fields(command).get(_NAMED[RequestCode(command.code)])
        if named is not None:
            return named
        brokers = await self._backend.brokers()
        return brokers[0] if len(brokers) == 1 else None

    async def _brokers_of(self, topic: str) -> set[str]:
        """Return the names of the brokers that have a topic and a master."""
        route = await self._backend.topic(topic)
        return set() if route is None else _masters_of(route)

    def _keep(self, client: _Client, heartbeat: Command | None) -> None:
        """Store a client's newest heartbeat in place of the last one, if there is room."""
        if self._clients.get(client.connection) is not client:
            return  # the client has disconnected meanwhile
        if client.heartbeat is not None:
            self._heartbeat_bytes -= len(client.heartbeat.body)
            assert self._heartbeat_bytes >= 0, "the stored heartbeats were counted"
        size = 0 if heartbeat is None else len(heartbeat.body)
        has_room = size <= _HEARTBEAT_BYTES_MAX and self._heartbeat_bytes + size <= _HEARTBEATS_BYTES_MAX
        client.heartbeat = heartbeat if has_room else None
        if client.heartbeat is not None:
            self._heartbeat_bytes += size


def _masters_of(route: TopicRoute) -> set[str]:
    return {data.broker_name for data in route.broker_datas if 0 in data.broker_addrs}


def _milliseconds(text: str | None) -> float:
    """Return the time for which a request is held, in ms: at most `_HOLD_MS_MAX`, and 0 if the text is not a number."""
    try:
        return max(0.0, min(float(int(text or 0)), _HOLD_MS_MAX))
    except (ValueError, OverflowError):
        return 0.0


def _only(names: set[str], what: str) -> str:
    """Return the only name in a body. Raises HeaderError: the body has several names, or no name."""
    if len(names) != 1:
        raise HeaderError(f"the body has to name {what}, and names {len(names)}")
    return names.pop()

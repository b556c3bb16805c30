"""Typed requests to brokers and name servers, one method per request code (``MQClientAPIImpl``, ``BrokerOuterAPI``).

Clients, administration and brokers use the same methods. Every method raises RemotingError if the broker does not
respond, and PeerRefused if the result of the method cannot represent the code of the response. Docstrings list only
further errors. Source: remoting.md §4.3, §4.4.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Sequence
from typing import TypeVar

import msgspec
from msgspec import Struct

from rmqkit.errors import BodyError, NoNameServer, PeerRefused, RemotingError
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import Body, Command, decode_header, request
from rmqkit.protocol.fastjson import decode_as
from rmqkit.protocol.schemas.brokers import DelayOffsets
from rmqkit.protocol.schemas.clients import (
    CheckClientBody,
    ConsumerGroupRequest,
    ConsumerIds,
    HeartbeatData,
    LockBody,
    LockedQueues,
    MessageQueue,
    SubscriptionData,
    UnregisterClientRequest,
)
from rmqkit.protocol.schemas.offsets import (
    ConsumerOffsets,
    OffsetResponse,
    QueryConsumerOffsetRequest,
    QueueRequest,
    SearchOffsetRequest,
    UpdateConsumerOffsetRequest,
)
from rmqkit.protocol.schemas.pop import (
    AckMessageRequest,
    Assignment,
    Assignments,
    BatchAckBody,
    ChangeInvisibleTimeRequest,
    ChangeInvisibleTimeResponse,
    MessageRequestMode,
    PopMessageRequest,
    PopMessageResponse,
    QueryAssignmentBody,
)
from rmqkit.protocol.schemas.pull import (
    PullMessageRequest,
    PullMessageResponse,
    QueryMessageRequest,
    ViewMessageRequest,
)
from rmqkit.protocol.schemas.send import (
    ConsumerSendBackRequest,
    EndTransactionRequest,
    RecallMessageRequest,
    RecallMessageResponse,
)
from rmqkit.protocol.schemas.topics import ClusterInfo, KVTable, RouteRequest, TopicList, TopicRoute
from rmqkit.remoting.client import RemotingClient, expect_success

OFFSET_TIMEOUT_MS = 5000
SEND_BACK_TIMEOUT_MS = 5000
QUERY_TIMEOUT_MS = 18_000

T = TypeVar("T")
H = TypeVar("H", bound=Struct)


class PullStatus(enum.Enum):
    """The outcome of a pull."""

    FOUND = "FOUND"
    """The result has messages."""
    NO_NEW_MESSAGE = "NO_NEW_MSG"
    """The offset is at the end of the queue."""
    NO_MATCHED_MESSAGE = "NO_MATCHED_MSG"
    """No message matched the expression. Pull again at ``next_begin_offset``."""
    OFFSET_ILLEGAL = "OFFSET_ILLEGAL"
    """The queue does not have the offset. Continue at ``next_begin_offset``."""


# These codes mean that the commit is stored, even if less durably than requested. It cannot be undone.
_COMMITTED = (ResponseCode.SUCCESS, ResponseCode.FLUSH_DISK_TIMEOUT, ResponseCode.FLUSH_SLAVE_TIMEOUT)
_PULL_STATUS: dict[int, PullStatus] = {
    ResponseCode.SUCCESS: PullStatus.FOUND,
    ResponseCode.PULL_NOT_FOUND: PullStatus.NO_NEW_MESSAGE,
    ResponseCode.PULL_RETRY_IMMEDIATELY: PullStatus.NO_MATCHED_MESSAGE,
    ResponseCode.PULL_OFFSET_MOVED: PullStatus.OFFSET_ILLEGAL,
}


class Pulled(Struct):
    """The response to a pull, with undecoded records."""

    status: PullStatus
    next_begin_offset: int
    min_offset: int
    max_offset: int
    suggested_broker_id: int
    body: bytes
    offset_delta: int = 0


class PopStatus(enum.Enum):
    """The outcome of a pop (behaviour.md §4.8)."""

    FOUND = "FOUND"
    NOT_FOUND = "POLLING_NOT_FOUND"
    POLLING_FULL = "POLLING_FULL"


_POP_STATUS: dict[int, PopStatus] = {
    ResponseCode.SUCCESS: PopStatus.FOUND,
    ResponseCode.POLLING_TIMEOUT: PopStatus.NOT_FOUND,
    ResponseCode.PULL_NOT_FOUND: PopStatus.NOT_FOUND,
    ResponseCode.POLLING_FULL: PopStatus.POLLING_FULL,
}


NEVER_LATE_MS = 1 << 62
"""The born time of a pop that waits for no message. The broker's clock may be ahead of this machine's by any time."""


def is_late(answer: Command) -> bool:
    """Return True if a broker refused a pop because, by its own clock, the pop's time was over before it arrived
    (behaviour.md §4.8)."""
    return answer.code == ResponseCode.POLLING_TIMEOUT and (answer.remark or "").endswith("is timeout too much")


class Popped(Struct):
    """The response to a pop, with undecoded records. Without messages, ``header`` has only default values.

    Attributes:
        was_late: the broker's clock is so far ahead of this machine's that the broker did not wait for a message.
    """

    status: PopStatus
    header: PopMessageResponse
    body: bytes
    was_late: bool = False


class BrokerCalls:
    """Requests to brokers by address. ``timeout_ms`` is the default timeout of a request.

    ===============  =========================================================================
    method           returns
    ===============  =========================================================================
    `call`           the response, with any response code
    `ask`            a successful response
    `fetch`          the body of a successful response
    `fetch_header`   the header of a successful response
    ===============  =========================================================================

    Raises BodyError, HeaderError: the body or the header of a response cannot be read.
    """

    def __init__(self, remoting: RemotingClient, timeout_ms: float) -> None:
        self.remoting = remoting
        self.timeout_ms = timeout_ms

    async def call(self, address: str, command: Command, timeout_ms: float | None = None) -> Command:
        """Return the response, with any response code."""
        return await self.remoting.call(address, command, timeout_ms or self.timeout_ms)

    async def ask(
        self,
        address: str,
        code: int,
        header: Struct | None = None,
        *,
        body: Body = b"",
        timeout_ms: float | None = None,
    ) -> Command:
        """Return a successful response."""
        return expect_success(await self.call(address, request(code, header, body), timeout_ms), address)

    async def fetch(
        self, kind: type[T], address: str, code: int, header: Struct | None = None, *, body: Body = b""
    ) -> T:
        """Return the body of a successful response."""
        return decode_as((await self.ask(address, code, header, body=body)).payload, kind)

    async def fetch_header(self, kind: type[H], address: str, code: int, header: Struct | None = None) -> H:
        """Return the header of a successful response."""
        return decode_header(await self.ask(address, code, header), kind)

    # -- clients and their groups

    async def heartbeat(self, address: str, data: HeartbeatData) -> int:
        """HEART_BEAT: send the groups and subscriptions of this client, and return the version of the broker."""
        return (await self.ask(address, RequestCode.HEART_BEAT, body=msgspec.json.encode(data))).version

    async def unregister(
        self, address: str, client_id: str, *, producer_group: str | None = None, consumer_group: str | None = None
    ) -> None:
        """UNREGISTER_CLIENT: remove this client from a group."""
        header = UnregisterClientRequest(client_id, producer_group, consumer_group)
        await self.ask(address, RequestCode.UNREGISTER_CLIENT, header)

    async def check_subscription(
        self, address: str, client_id: str, group: str, subscription: SubscriptionData
    ) -> None:
        """CHECK_CLIENT_CONFIG: check a subscription.
        Raises PeerRefused: the broker cannot filter by the expression. The remark has the reason."""
        body = CheckClientBody(client_id=client_id, group=group, subscription_data=subscription)
        await self.ask(address, RequestCode.CHECK_CLIENT_CONFIG, body=msgspec.json.encode(body))

    async def consumer_ids(self, address: str, group: str) -> list[str]:
        """GET_CONSUMER_LIST_BY_GROUP: return the client ids of a group."""
        code, header = RequestCode.GET_CONSUMER_LIST_BY_GROUP, ConsumerGroupRequest(group)
        return (await self.fetch(ConsumerIds, address, code, header)).consumer_id_list

    async def lock_queues(
        self, address: str, group: str, client_id: str, queues: list[MessageQueue]
    ) -> set[MessageQueue]:
        """LOCK_BATCH_MQ: lock queues for this client, and return the queues that are now locked for it."""
        body = LockBody(client_id=client_id, consumer_group=group, queues=queues)
        encoded = msgspec.json.encode(body)
        return set((await self.fetch(LockedQueues, address, RequestCode.LOCK_BATCH_MQ, body=encoded)).queues)

    async def unlock_queues(self, address: str, group: str, client_id: str, queues: list[MessageQueue]) -> None:
        """UNLOCK_BATCH_MQ: unlock queues."""
        body = LockBody(client_id=client_id, consumer_group=group, queues=queues)
        await self.ask(address, RequestCode.UNLOCK_BATCH_MQ, body=msgspec.json.encode(body))

    async def committed_offset(
        self,
        address: str,
        group: str,
        queue: MessageQueue,
        *,
        is_stored: bool = False,
        timeout_ms: float = OFFSET_TIMEOUT_MS,
    ) -> int | None:
        """QUERY_CONSUMER_OFFSET: return the offset of a group in a queue, or None if the broker has no offset. For a
        new queue without an offset, the broker returns 0, unless ``is_stored`` requires a stored offset."""
        # None omits the field setZeroIfNotFound. Its default in brokers is true.
        header = QueryConsumerOffsetRequest(
            group, queue.topic, queue.queue_id, False if is_stored else None, queue.broker_name
        )
        answer = await self.call(address, request(RequestCode.QUERY_CONSUMER_OFFSET, header), timeout_ms)
        if answer.code == ResponseCode.QUERY_NOT_FOUND:
            return None
        return decode_header(expect_success(answer, address), OffsetResponse).offset

    async def commit_offset(self, address: str, group: str, queue: MessageQueue, offset: int) -> None:
        """UPDATE_CONSUMER_OFFSET: commit the offset of a group, and wait for the response."""
        header = UpdateConsumerOffsetRequest(group, queue.topic, queue.queue_id, offset, queue.broker_name)
        await self.ask(address, RequestCode.UPDATE_CONSUMER_OFFSET, header, timeout_ms=OFFSET_TIMEOUT_MS)

    async def commit_offset_one_way(self, address: str, group: str, queue: MessageQueue, offset: int) -> None:
        """UPDATE_CONSUMER_OFFSET: commit the offset of a group, without a response."""
        header = UpdateConsumerOffsetRequest(group, queue.topic, queue.queue_id, offset, queue.broker_name)
        command = request(RequestCode.UPDATE_CONSUMER_OFFSET, header, one_way=True)
        await self.remoting.send_one_way(address, command, OFFSET_TIMEOUT_MS)

    async def max_offset(self, address: str, queue: MessageQueue) -> int:
        """GET_MAX_OFFSET: return the offset after the last message of a queue."""
        header = QueueRequest(queue.topic, queue.queue_id, bname=queue.broker_name)
        return (await self.fetch_header(OffsetResponse, address, RequestCode.GET_MAX_OFFSET, header)).offset

    async def min_offset(self, address: str, queue: MessageQueue) -> int:
        """GET_MIN_OFFSET: return the offset of the first stored message of a queue.

        Brokers return -1 for an empty batch queue. This method returns 0 then, the offset of the first message to come.
        """
        header = QueueRequest(queue.topic, queue.queue_id, bname=queue.broker_name)
        return max(0, (await self.fetch_header(OffsetResponse, address, RequestCode.GET_MIN_OFFSET, header)).offset)

    async def search_offset(self, address: str, queue: MessageQueue, timestamp_ms: int) -> int:
        """SEARCH_OFFSET_BY_TIMESTAMP: return the offset of the first message stored at or after a time."""
        header = SearchOffsetRequest(queue.topic, queue.queue_id, timestamp_ms, bname=queue.broker_name)
        code = RequestCode.SEARCH_OFFSET_BY_TIMESTAMP
        return (await self.fetch_header(OffsetResponse, address, code, header)).offset

    async def view_message(self, address: str, topic: str, physical_offset: int) -> bytes:
        """VIEW_MESSAGE_BY_ID: return the record at a physical offset of the broker's log."""
        header = ViewMessageRequest(physical_offset, topic)
        return (await self.ask(address, RequestCode.VIEW_MESSAGE_BY_ID, header)).payload

    async def query_messages(self, address: str, header: QueryMessageRequest) -> bytes:
        """QUERY_MESSAGE: return the records that have a key with the same hash. The result may be empty."""
        answer = await self.call(address, request(RequestCode.QUERY_MESSAGE, header), QUERY_TIMEOUT_MS)
        return b"" if answer.code == ResponseCode.QUERY_NOT_FOUND else expect_success(answer, address).payload

    async def send_back(self, address: str, header: ConsumerSendBackRequest) -> None:
        """CONSUMER_SEND_MSG_BACK: redeliver a message later, or move it to the dead letters."""
        await self.ask(address, RequestCode.CONSUMER_SEND_MSG_BACK, header, timeout_ms=SEND_BACK_TIMEOUT_MS)

    async def end_transaction(self, address: str, header: EndTransactionRequest, remark: str | None) -> None:
        """END_TRANSACTION: send the result of a transaction, without a response.

        If the request is lost, the broker checks the transaction again.
        """
        command = request(RequestCode.END_TRANSACTION, header, one_way=True)
        command.remark = remark
        await self.remoting.send_one_way(address, command, self.timeout_ms)

    async def ask_end_transaction(self, address: str, header: EndTransactionRequest, timeout_ms: float) -> None:
        """END_TRANSACTION: send the result of a transaction, and wait until the broker has stored it."""
        answer = await self.remoting.call(address, request(RequestCode.END_TRANSACTION, header), timeout_ms)
        if answer.code not in _COMMITTED:
            raise PeerRefused(answer.code, answer.remark, address)

    async def runtime_info(self, address: str) -> dict[str, str]:
        """GET_BROKER_RUNTIME_INFO: return the runtime values of a broker as texts."""
        return (await self.fetch(KVTable, address, RequestCode.GET_BROKER_RUNTIME_INFO)).table

    async def recall(self, address: str, header: RecallMessageRequest) -> str:
        """RECALL_MESSAGE: return the unique key of the message that will not be delivered."""
        return (await self.fetch_header(RecallMessageResponse, address, RequestCode.RECALL_MESSAGE, header)).msg_id

    async def pull(self, address: str, header: PullMessageRequest, timeout_ms: float) -> Pulled:
        """PULL_MESSAGE: pull messages from a queue."""
        answer = await self.remoting.call(address, request(RequestCode.PULL_MESSAGE, header), timeout_ms)
        status = _PULL_STATUS.get(answer.code)
        if status is None:
            raise PeerRefused(answer.code, answer.remark, address)
        numbers = decode_header(answer, PullMessageResponse)
        return Pulled(
            status,
            numbers.next_begin_offset,
            numbers.min_offset,
            numbers.max_offset,
            numbers.suggest_which_broker_id,
            answer.payload,
            numbers.offset_delta or 0,
        )

    async def pop(self, address: str, header: PopMessageRequest, timeout_ms: float) -> Popped:
        """POP_MESSAGE: pop messages of a topic. If the broker's clock is so far ahead that each pop is late for it, pop
        without a wait; without messages the status is then POLLING_FULL, so that the caller pauses."""
        if header.poll_time <= 0:
            header.born_time = NEVER_LATE_MS
        answer = await self.remoting.call(address, request(RequestCode.POP_MESSAGE, header), timeout_ms)
        was_late = is_late(answer) and header.poll_time > 0
        if was_late:
            header.poll_time, header.born_time = 0, NEVER_LATE_MS
            answer = await self.remoting.call(address, request(RequestCode.POP_MESSAGE, header), timeout_ms)
        status = _POP_STATUS.get(answer.code)
        if status is None:
            raise PeerRefused(answer.code, answer.remark, address)
        # Responses with other codes may lack the fields of this header.
        if status is not PopStatus.FOUND:
            return Popped(PopStatus.POLLING_FULL if was_late else status, PopMessageResponse(), b"", was_late)
        return Popped(status, decode_header(answer, PopMessageResponse), answer.payload, was_late)

    async def ack(self, address: str, header: AckMessageRequest) -> None:
        """ACK_MESSAGE: acknowledge a popped message."""
        await self.ask(address, RequestCode.ACK_MESSAGE, header)

    async def ack_batch(self, address: str, body: BatchAckBody) -> None:
        """BATCH_ACK_MESSAGE: acknowledge popped messages of one broker."""
        await self.ask(address, RequestCode.BATCH_ACK_MESSAGE, body=msgspec.json.encode(body))

    async def change_invisible_time(
        self, address: str, header: ChangeInvisibleTimeRequest
    ) -> ChangeInvisibleTimeResponse:
        """CHANGE_MESSAGE_INVISIBLETIME: set the time after which a popped message is redelivered."""
        code = RequestCode.CHANGE_MESSAGE_INVISIBLETIME
        return await self.fetch_header(ChangeInvisibleTimeResponse, address, code, header)

    async def assignments(self, address: str, asked: QueryAssignmentBody) -> list[Assignment]:
        """QUERY_ASSIGNMENT: return the queues of a topic that the broker assigns to a client. If the broker does not
        know the client, return no queues."""
        code, body = RequestCode.QUERY_ASSIGNMENT, msgspec.json.encode(asked)
        return (await self.fetch(Assignments, address, code, body=body)).message_queue_assignments

    async def set_request_mode(self, address: str, mode: MessageRequestMode) -> None:
        """SET_MESSAGE_REQUEST_MODE: make a group pop or pull a topic. Each broker has its own setting."""
        await self.ask(address, RequestCode.SET_MESSAGE_REQUEST_MODE, body=msgspec.json.encode(mode))

    # -- state that the brokers of a group copy from each other

    async def consumer_offsets(self, address: str) -> ConsumerOffsets:
        """GET_ALL_CONSUMER_OFFSET: return the offsets of all groups."""
        return await self.fetch(ConsumerOffsets, address, RequestCode.GET_ALL_CONSUMER_OFFSET)

    async def delay_offsets(self, address: str) -> DelayOffsets:
        """GET_ALL_DELAY_OFFSET: return the delivery offset of each delay level."""
        return await self.fetch(DelayOffsets, address, RequestCode.GET_ALL_DELAY_OFFSET)


# ---------------------------------------------------------------- name servers

_log = logging.getLogger(__name__)


class NameServers:
    """The name servers of a cluster (``NameServerAddressManager``). A request tries one name server after the other
    until one responds. Use it only on the event loop.

    If a name server does not respond, the next request begins with the following name server.
    Source: behaviour.md §7.1; remoting.md §4.2.

    Every method raises NoNameServer if no name server responds, and PeerRefused if a response has an unexpected code.

    Args:
        addresses: the addresses, which may change during use.
        calls: sends the requests.
        first: index of the first name server to use, modulo their number. Clients choose a random index to spread the
            load.
    """

    def __init__(self, addresses: Sequence[str], calls: BrokerCalls, *, first: int = 0) -> None:
        self.addresses = addresses
        self._calls = calls
        self._chosen = first

    async def call(self, code: int, header: Struct | None = None) -> tuple[Command, str]:
        """Send a request to one name server after the other until one responds. Return the response, with any response
        code, and the address of its name server."""
        failures: list[RemotingError] = []
        # Copy the addresses, because they may change during a call.
        first, addresses = self._chosen, tuple(self.addresses)
        for chosen in range(first, first + len(addresses)):
            address = addresses[chosen % len(addresses)]
            try:
                return await self._calls.call(address, request(code, header)), address
            except RemotingError as error:
                failures.append(error)
                self._chosen = chosen + 1  # so that the next request does not wait for this server
                _log.info("name server %s: %s", address, error)
        raise NoNameServer(failures)

    async def fetch(self, kind: type[T], code: int, header: Struct | None = None) -> T:
        """Return the body of a successful response. Raises BodyError: the body cannot be read."""
        answer, address = await self.call(code, header)
        return decode_as(expect_success(answer, address).payload, kind)

    async def route(self, topic: str) -> TopicRoute | None:
        """GET_ROUTEINFO_BY_TOPIC: return the route of a topic, or None if the name server does not know the topic."""
        header = RouteRequest(topic, accept_standard_json_only=True)
        answer, address = await self.call(RequestCode.GET_ROUTEINFO_BY_TOPIC, header)
        if answer.code == ResponseCode.TOPIC_NOT_EXIST:
            return None
        body = expect_success(answer, address).payload
        try:
            return decode_as(body, TopicRoute)
        except BodyError as error:
            raise PeerRefused(answer.code, f"the route of topic {topic} cannot be read: {error}", address) from None

    async def brokers(self) -> ClusterInfo | None:
        """GET_BROKER_CLUSTER_INFO: return the registered brokers, or None if the response has an error code or cannot
        be read."""
        answer, _ = await self.call(RequestCode.GET_BROKER_CLUSTER_INFO)
        try:
            return decode_as(answer.payload, ClusterInfo) if answer.code == ResponseCode.SUCCESS else None
        except BodyError:
            return None

    async def topics(self) -> list[str]:
        """GET_ALL_TOPIC_LIST_FROM_NAMESERVER: return the names of all topics, sorted."""
        return sorted((await self.fetch(TopicList, RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER)).topic_list)

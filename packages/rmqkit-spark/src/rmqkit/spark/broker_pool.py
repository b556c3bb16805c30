"""Requests to the brokers of some name servers, for queues, offsets and messages, by blocking callers.

`BrokerPool` uses the routes and requests of the client, on the loop thread of the process
(`rmqkit.client.runtime.process`). A process has one set of connections per name servers and user, so a reused Python
worker connects once. A request that a broker does not answer is retried for ``brokerPatienceMs``. The answer of a
broker is final if the broker is the master, and has dispatched its whole log to queues.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import re
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from typing import Any, TypeVar

from msgspec import Struct

from rmqkit.client.runtime.process import portal
from rmqkit.client.runtime.routes import MASTER_ID
from rmqkit.client.runtime.runtime import ClientRuntime
from rmqkit.client.runtime.settings import ClientSettings
from rmqkit.errors import (
    REMEDIES,
    BodyError,
    ConnectFailed,
    NoRoute,
    PeerRefused,
    RecordCorrupt,
    RemotingError,
    RmqError,
)
from rmqkit.filter import subscription
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.names import lite_queue, split_lite_queue, with_namespace
from rmqkit.protocol.record import INNER_BATCH, decode_record, layout_of
from rmqkit.protocol.schemas.clients import MessageQueue
from rmqkit.protocol.schemas.pull import PullFlag, PullMessageRequest
from rmqkit.protocol.schemas.topics import ClusterInfo
from rmqkit.remoting.authentication import Credentials
from rmqkit.remoting.tls import Tls
from rmqkit.rpc import NameServers, Pulled, PullStatus
from rmqkit.spark.options import LiveOptions, words

T = TypeVar("T")

Offsets = dict[MessageQueue, int]
"""Offset of the next message to read of every queue."""

_log = logging.getLogger(__name__)

_RETRY_PAUSE_S = 0.5
_DISPATCH_PAUSE_S = 0.01
_CHUNK_BYTES = 4 << 20
_PASSING_CODES = (ResponseCode.SYSTEM_BUSY, ResponseCode.SERVICE_NOT_AVAILABLE)
_SAMPLE_COUNT = 16
_OFFSETS_END = (1 << 63) - 1
_LOG_OFFSET, _LOG_OFFSET_AT = struct.Struct(">q"), layout_of(0).positions["physical_offset"]


class Range(Struct, frozen=True):
    """Messages of a queue: offsets from ``low`` up to ``high``.

    Attributes:
        log_offset_max: greatest log offset that its messages may have, -1 if unknown. A message with a greater log
            offset belongs to a queue that was deleted and created again.
    """

    queue: MessageQueue
    low: int
    high: int
    log_offset_max: int = -1


class DataLost(RmqError):
    """Messages that had to be read were deleted."""

    def __init__(self, queue: MessageQueue, low: int, high: int | None, why: str) -> None:
        which = f"messages from {low} on" if high is None else f"messages {low} to {high - 1}"
        super().__init__(
            f"{which} of queue {queue.queue_id} of {queue.topic} on {queue.broker_name} are gone:"
            f" {why}; failOnDataLoss=false continues without them"
        )


class _NotYet(RmqError):
    """A queue has no route, or ends before an offset that it had before: its broker may be restarting."""

    def __init__(self, found: dict[MessageQueue, Bounds] | None = None, pulled: Pulled | None = None) -> None:
        super().__init__("a queue does not have its former messages again")
        self.found = found or {}
        self.pulled = pulled


class _Gone(RmqError):
    """A queue was deleted, or its messages are those of a queue that was created again."""


class Bounds(Struct, frozen=True):
    """The bounds of a queue: the offset of its first stored message, and the offset after its last."""

    low: int
    high: int


class Mark(Struct, frozen=True):
    """The log offset and the store time of a message. They distinguish the message from another message with the same
    queue offset, after the queue was deleted and created again."""

    log_offset: int
    stored_ms: int


class BrokerPool:
    """Connections to the brokers of some name servers, used by `source` and `sink`. Thread-safe: all requests run on
    the portal's loop."""

    def __init__(self, options: LiveOptions) -> None:
        self._options = options
        self._portal = portal()
        self._runtime = self._portal.run(self._started)
        self._portal.close_at_exit(self._runtime)

    async def _started(self) -> ClientRuntime:
        options = self._options
        settings = ClientSettings(
            auth=Credentials(options.access_key, options.secret_key) if options.access_key else None,
            namespace=options.namespace,
            tls=Tls(trusted=options.trusted, verify=bool(options.trusted)) if options.use_tls else None,
            api_timeout_ms=options.pull_timeout_ms,
        )
        runtime = ClientRuntime(options.name_servers or None, settings=settings)
        await runtime.start()
        return runtime

    @property
    def is_from_parent(self) -> bool:
        """Return True if this process was forked and the connections belong to its parent."""
        return self._portal.is_from_parent

    @property
    def runtime(self) -> ClientRuntime:
        """The connections. A producer can share them. Use them only on the portal's loop."""
        return self._runtime

    def wait_dispatched(self, queues: Iterable[MessageQueue]) -> None:
        """Wait until every message that the brokers of some queues have stored so far can be pulled. The dispatcher
        adds messages to queues in the order of the log, some time after the broker answered the sender."""

        async def dispatched(queue: MessageQueue) -> None:
            # Read the end of the log once: while others send, the log grows, and the wait would never finish.
            stored, _ = await self._log_ends(await self._address(queue))
            while True:
                if (await self._log_ends(await self._address(queue)))[1] >= stored:
                    return
                await asyncio.sleep(_DISPATCH_PAUSE_S)

        async def all_of_them() -> None:
            one_each = {queue.broker_name: queue for queue in queues}  # all queues of a broker share one log
            await asyncio.gather(
                *(self._patiently(functools.partial(dispatched, queue)) for queue in one_each.values())
            )

        self._portal.run(all_of_them)

    def queues(self, topics: Iterable[str], pattern: str = "") -> list[MessageQueue]:
        """List the readable queues of some topics, or of the topics whose whole name matches ``pattern``.
        Raises NoRoute: a topic does not exist, or no name server answers."""
        return self._portal.run(lambda: self._queues(list(topics), pattern))

    def bounds(self, queues: Iterable[MessageQueue]) -> dict[MessageQueue, Bounds]:
        """Request the bounds of queues from their brokers.
        Raises RemotingError, PeerRefused: a broker does not answer, or refuses."""
        return self._portal.run(lambda: self._bounds(queues))

    def reach(
        self, topics: Iterable[str], pattern: str, assigned: list[MessageQueue], begun: Offsets
    ) -> dict[MessageQueue, Bounds]:
        """Return the bounds of the wanted queues. Wait until queues that were read before reach the offsets in
        ``begun`` again, while their broker is away or has not settled. Deleted topics and queues are left out.
        Raises NoRoute, RemotingError, PeerRefused: see `queues` and `bounds`."""

        is_said = False

        async def reached() -> dict[MessageQueue, Bounds]:
            nonlocal is_said
            queues = assigned or await self._queues(list(topics), pattern, must_exist=not begun)
            found = await self._bounds(queues)
            short = [queue for queue, offset in begun.items() if queue in found and found[queue].high < offset]
            routes = self._runtime.routes
            away = {
                queue.broker_name
                for queue in short
                if not await self._has_settled(routes.address(routes.broker_of(queue)))
            }
            missing = begun.keys() - found.keys()
            masters = await self._masters() if missing else {}
            for queue in missing:
                if not await self._is_gone(queue, begun[queue], masters.get(queue.broker_name)):
                    away.add(queue.broker_name)
            if away:
                if not is_said:
                    wait_s = self._options.patience_ms / 1000
                    _log.warning("waiting up to %g s for the brokers %s", wait_s, ", ".join(sorted(away)))
                    is_said = True
                # Makes `_patiently` retry; after its time the caller uses the bounds that were found.
                raise _NotYet(found)
            return found

        try:
            return self._portal.run(lambda: self._patiently(reached) if begun else reached())
        except _NotYet as late:
            return late.found

    async def _has_settled(self, master: str | None) -> bool:
        """Return True if the reported ends of queues are final.
        A slave may lag, and a restarted broker may still dispatch messages of its log to queues."""
        if master is None:
            return False
        try:
            end, dispatched = await self._log_ends(master)
        except PeerRefused:  # the user has no permission for this request
            return False
        return dispatched >= end

    async def _is_gone(self, queue: MessageQueue, offset: int, master: str | None) -> bool:
        """Return True if the broker of a queue that has no route does not have the queue.
        A missing route alone is no proof: the name server may have just started, and not know all topics yet."""
        if master is None:
            return False
        try:
            if offset == 0:  # an empty queue ends at 0 like a missing queue, but only the missing queue refuses a pull
                await self._pull(queue, 0, 1, master)
                return False
            return await self._runtime.calls.max_offset(master, queue) < offset and await self._has_settled(master)
        except PeerRefused as error:
            return error.code == ResponseCode.TOPIC_NOT_EXIST

    async def _masters(self) -> dict[str, str]:
        """Return the addresses of the masters that a name server knows, by broker name."""
        name_servers = NameServers(self._runtime.name_servers, self._runtime.calls)
        try:
            cluster = await name_servers.fetch(ClusterInfo, RequestCode.GET_BROKER_CLUSTER_INFO)
        except (PeerRefused, BodyError):
            return {}
        brokers = cluster.broker_addr_table.items()
        return {name: data.broker_addrs[MASTER_ID] for name, data in brokers if MASTER_ID in data.broker_addrs}

    def marks(self, offsets: Offsets) -> dict[MessageQueue, Mark]:
        """Read the mark of the message before each offset. Queues without this message are left out.
        Raises RemotingError, PeerRefused: see `bounds`."""

        async def one(queue: MessageQueue, offset: int) -> Mark | None:
            try:
                pulled = await self._pull(queue, offset, 1, expression="*")
            except PeerRefused as error:
                if error.code == ResponseCode.TOPIC_NOT_EXIST:
                    return None
                raise
            if pulled.status is not PullStatus.FOUND or not pulled.body:
                return None
            try:
                first = decode_record(pulled.body)
            except RecordCorrupt as error:
                raise BodyError(f"a pulled body of {len(pulled.body)} bytes has no record at byte 0") from error
            # A compacted topic may return a later message. An inner batch has the offset of its first message.
            if first.queue_offset != offset and not first.sys_flag & INNER_BATCH:
                return None
            return Mark(first.physical_offset, first.store_timestamp)

        async def every() -> list[Mark | None]:
            asked = (functools.partial(one, queue, offset - 1) for queue, offset in wanted.items())
            return await asyncio.gather(*map(self._patiently, asked))

        wanted = {queue: offset for queue, offset in offsets.items() if offset > 0}
        found = self._portal.run(every) if wanted else []
        return {queue: mark for queue, mark in zip(wanted, found, strict=True) if mark is not None}

    def search(self, queue: MessageQueue, timestamp_ms: int) -> int:
        """Return the offset of the first message stored at or after a time, or the end of the queue if there is no such
        message."""

        async def found() -> int:
            return await self._runtime.calls.search_offset(await self._address(queue), queue, timestamp_ms)

        return self._portal.run(lambda: self._patiently(found))

    def committed(self, group: str, queues: Iterable[MessageQueue]) -> Offsets:
        """Return the offsets of a group that the brokers store. Queues without an offset are left out.
        Raises RemotingError, NoRoute, PeerRefused: a broker did not answer, or refused."""

        async def one(queue: MessageQueue) -> tuple[MessageQueue, int | None]:
            address = await self._address(queue)
            return queue, await self._runtime.calls.committed_offset(address, group, queue, is_stored=True)

        async def every() -> Offsets:
            requests = (self._patiently(functools.partial(one, queue)) for queue in queues)
            found = await asyncio.gather(*requests)
            return {queue: offset for queue, offset in found if offset is not None}

        return self._portal.run(every)

    def commit(self, group: str, offsets: dict[MessageQueue, int]) -> None:
        """Save the offsets of a group at the brokers.
        Raises RemotingError, NoRoute, PeerRefused: a broker did not answer, or refused."""

        async def one(queue: MessageQueue, offset: int) -> None:
            calls, address = self._runtime.calls, await self._address(queue)
            try:
                await calls.commit_offset(address, group, queue, offset)
            except PeerRefused as error:
                if error.code != ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST:
                    raise
                await self._pull(
                    queue, offset, 1
                )  # the group pulled nothing from this broker, so the broker does not know it yet
                await calls.commit_offset(address, group, queue, offset)

        async def every() -> None:
            saves = (self._patiently(functools.partial(one, *place)) for place in offsets.items())
            await asyncio.gather(*saves)

        self._portal.run(every)

    def mean_bytes(self, queue: MessageQueue, offset: int) -> float | None:
        """Return the mean size in bytes of a few records from an offset on, or None if there are no records."""

        async def sample() -> Pulled:
            return await self._pull(queue, offset, _SAMPLE_COUNT)

        pulled = self._portal.run(lambda: self._patiently(sample))
        count = pulled.next_begin_offset - offset
        return len(pulled.body) / count if pulled.status is PullStatus.FOUND and count > 0 else None

    def bodies(self, part: Range) -> Iterator[bytes]:
        """Yield the stored records of a range of a queue, some MiB at a time; inner batches may exceed the range.
        Raises DataLost: ``failOnDataLoss`` is set, and records are missing.
        Raises RemotingError, PeerRefused: see `bounds`."""
        pieces = self._bodies(part)
        # One step of the generator per call: nothing is pulled ahead while the caller decodes, so a task holds only
        # one chunk.
        while (body := self._portal.run(functools.partial(anext, pieces, b""))) != b"":
            yield body

    def pull_options(self, queue: MessageQueue) -> dict[str, Any]:
        """Return all that another client needs to pull from a queue as this pool does, as plain values."""
        options, namespace = self._options, self._options.namespace
        wanted = subscription(queue.topic, options.expression, expression_type=options.expression_type)
        known = self._runtime.routes.any_address(queue.broker_name)
        return {
            "nameServers": list(self._runtime.name_servers),
            "address": "" if known is None else known[1],
            "topicName": with_namespace(namespace, queue.topic),
            "routeTopic": with_namespace(namespace, _route_topic(queue)),
            "group": with_namespace(namespace, options.commit_group or options.group),
            "expression": wanted.sub_string,
            "expressionType": wanted.expression_type,
            "accessKey": options.access_key,
            "secretKey": options.secret_key,
            "useTls": options.use_tls,
            "trusted": options.trusted,
            "pullCount": options.pull_count,
            "pullTimeoutMs": options.pull_timeout_ms,
            "patienceMs": options.patience_ms,
            "failOnDataLoss": options.fail_on_data_loss,
            "remedies": REMEDIES,
        }

    def report(self, lost: DataLost) -> None:
        """Raise DataLost for lost messages if ``failOnDataLoss`` is set, otherwise log the loss."""
        if self._options.fail_on_data_loss:
            raise lost
        _log.warning("%s", lost)

    async def _bounds(self, queues: Iterable[MessageQueue]) -> dict[MessageQueue, Bounds]:
        async def bounds_of(queue: MessageQueue) -> tuple[MessageQueue, Bounds]:
            address = await self._address(queue)
            calls = self._runtime.calls
            low, high = await asyncio.gather(calls.min_offset(address, queue), calls.max_offset(address, queue))
            return queue, Bounds(low, high)

        return dict(await asyncio.gather(*(self._patiently(functools.partial(bounds_of, one)) for one in queues)))

    async def _queues(self, topics: list[str], pattern: str, *, must_exist: bool = True) -> list[MessageQueue]:
        routes = self._runtime.routes
        if pattern:
            known = await routes.topics()
            topics = [name for name in known if re.fullmatch(pattern, name)]
        found: list[MessageQueue] = []
        for topic in sorted(topics):
            if not await routes.refresh(topic):
                # A topic that matched the pattern may be deleted meanwhile; a topic that the options name must exist.
                if pattern or not must_exist:
                    continue
                raise NoRoute(f"rocketmq: topic {topic} does not exist: create it, or send a message to it first")
            found += routes.subscribe_queues(topic)
        return found

    async def _bodies(self, part: Range) -> AsyncIterator[bytes]:
        """Join the bodies of `_pulled` into large chunks, because the cost of decoding with Arrow grows with the number
        of chunks."""
        chunk: list[bytes] = []
        async for body in self._pulled(part):
            chunk.append(body)
            if sum(map(len, chunk)) >= _CHUNK_BYTES:
                yield b"".join(chunk)
                chunk.clear()
        if chunk:
            yield b"".join(chunk)

    async def _pulled(self, part: Range) -> AsyncIterator[bytes]:
        offset = part.low
        while offset < part.high:
            count = min(self._options.pull_count, part.high - offset)
            try:
                pulled = await self._patiently(functools.partial(self._pull_there, part, offset, count))
            except _Gone as why:
                self.report(DataLost(part.queue, offset, part.high, str(why)))
                return
            except _NotYet as short:
                end = short.pulled.max_offset if short.pulled else offset
                self.report(DataLost(part.queue, offset, part.high, f"the queue ends at {end}"))
                return
            except (RemotingError, NoRoute, PeerRefused) as error:
                queue = part.queue
                place = f"queue {queue.queue_id} of {queue.topic} on {queue.broker_name}, from offset {offset}"
                error.args = (f"{place}: {error}",)
                raise
            if pulled.status is PullStatus.FOUND:
                yield pulled.body
            # Retention deleted the messages, and the answer contains the new start of the queue. Only move forward:
            # going back would return rows twice.
            elif pulled.status is PullStatus.OFFSET_ILLEGAL and pulled.next_begin_offset > offset:
                gone = min(pulled.next_begin_offset, part.high)
                self.report(DataLost(part.queue, offset, gone, f"the queue begins at {pulled.min_offset}"))
            before = offset
            # A filter may exclude all messages that the broker read, but an answer with messages must advance.
            offset = max(pulled.next_begin_offset, offset + (pulled.status is PullStatus.FOUND))
            assert offset >= before, "the offset never moves backwards"

    async def _pull_there(self, part: Range, offset: int, count: int) -> Pulled:
        """Pull messages of a range. Raises _NotYet: the queue ends before the offset, although it had a message there.
        Raises _Gone: the queue was deleted, or was created again."""
        queue = part.queue
        try:
            pulled = await self._pull(queue, offset, count)
        except (ConnectFailed, NoRoute, PeerRefused) as error:
            is_missing = not isinstance(error, PeerRefused) or error.code == ResponseCode.TOPIC_NOT_EXIST
            # A broker that has no such queue reports 0 as its end.
            if is_missing and await self._is_gone(queue, offset + 1, (await self._masters()).get(queue.broker_name)):
                raise _Gone("its topic was deleted") from error
            raise
        if pulled.status is PullStatus.FOUND:
            is_record = len(pulled.body) >= _LOG_OFFSET_AT + _LOG_OFFSET.size  # else the decoder reports it
            log_offset = _LOG_OFFSET.unpack_from(pulled.body, _LOG_OFFSET_AT)[0] if is_record else -1
            if 0 <= part.log_offset_max < log_offset:
                raise _Gone(
                    f"the queue was deleted and created again: its message {offset} is at log offset {log_offset},"
                    f" greater than {part.log_offset_max}"
                )
        elif pulled.status is PullStatus.NO_NEW_MESSAGE or pulled.max_offset <= offset:
            raise _NotYet(pulled=pulled)
        return pulled

    async def _pull(
        self, queue: MessageQueue, offset: int, count: int, address: str = "", *, expression: str = ""
    ) -> Pulled:
        """Pull messages that match an expression of tags, by default the expression of the options. ``address``: the
        broker, by default the one in the route."""
        options = self._options
        if expression:
            wanted = subscription(queue.topic, expression)
        else:
            wanted = subscription(queue.topic, options.expression, expression_type=options.expression_type)
        # Neither SUSPEND nor COMMIT_OFFSET: a task must not wait at the end of its range, and the checkpoint stores
        # the progress, not a pull.
        header = PullMessageRequest(
            consumer_group=options.commit_group or options.group,
            topic=queue.topic,
            queue_id=queue.queue_id,
            queue_offset=offset,
            max_msg_nums=count,
            sys_flag=int(PullFlag.SUBSCRIPTION),
            commit_offset=0,
            suspend_timeout_millis=0,
            sub_version=self._runtime.clock.now_ms(),
            subscription=wanted.sub_string,
            expression_type=wanted.expression_type,
            bname=queue.broker_name,
        )
        address = address or await self._address(queue)
        return await self._runtime.calls.pull(address, header, options.pull_timeout_ms)

    async def _log_ends(self, address: str) -> tuple[int, int]:
        """Return the end of a broker's log, and the end of the part that was dispatched to queues."""
        figures = await self._runtime.calls.runtime_info(address)
        end = int(figures["commitLogMaxOffset"])
        return end, end - int(figures["dispatchBehindBytes"])

    async def _patiently(self, work: Callable[[], Awaitable[T]]) -> T:
        """Call ``work``, and retry it while a broker or the name servers do not answer."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._options.patience_ms / 1000.0
        while True:
            try:
                return await work()
            except (RemotingError, NoRoute, PeerRefused, _NotYet) as error:
                lasts = isinstance(error, PeerRefused) and error.code not in _PASSING_CODES
                if lasts or loop.time() > deadline:
                    raise
                _log.info("trying again: %s", error)
            await asyncio.sleep(_RETRY_PAUSE_S)
            with contextlib.suppress(NoRoute):
                await self._runtime.routes.refresh_all()

    async def _address(self, queue: MessageQueue) -> str:
        return await self._runtime.routes.find_address(queue.broker_name, _route_topic(queue))


_connected: dict[LiveOptions, BrokerPool] = {}


def broker_pool(options: LiveOptions) -> BrokerPool:
    """Return the connections of this process for some options; the first call makes them.
    Raises SettingsError: no name server is known. Raises NoRoute: no name server answers."""
    known = _connected.get(options)
    # Spark forks its Python workers from a daemon: two processes must not share the daemon's connections.
    if known is None or known.is_from_parent:
        known = _connected[options] = BrokerPool(options)
    return known


def wanted_topics(options: LiveOptions) -> list[str]:
    """List the topics that the options name."""
    return words(options.topics) + words(options.topic)


def light_queues(queues: Iterable[MessageQueue], lite_topics: Iterable[str]) -> list[MessageQueue]:
    """Return the light queues of some lite topics at every broker that has a queue of their parents."""
    places = {(queue.topic, queue.broker_name) for queue in queues}
    names = sorted((lite_queue(topic, lite), broker) for topic, broker in places for lite in lite_topics)
    return [MessageQueue(name, broker, 0) for name, broker in names]


def offsets_in(part: Range) -> tuple[int, int]:
    """Return the lowest queue offset that the records of a range may have, and the offset after the highest one. The
    records of a light queue have the offsets of their own queues."""
    return (part.low, part.high) if split_lite_queue(part.queue.topic) is None else (0, _OFFSETS_END)


def _route_topic(queue: MessageQueue) -> str:
    """Return the topic whose route has a queue: that of a light queue is its parent."""
    lite = split_lite_queue(queue.topic)
    return queue.topic if lite is None else lite[0]


def numbered(queues: Iterable[MessageQueue]) -> dict[MessageQueue, int]:
    """Number the queues of each topic."""
    numbers: dict[MessageQueue, int] = {}
    counts: dict[str, int] = {}
    for queue in sorted(queues):
        numbers[queue] = counts.get(queue.topic, 0)
        counts[queue.topic] = numbers[queue] + 1
    return numbers

"""A `BrokerPool` asks the brokers behind some name servers for queues, offsets and messages, for blocking callers.

The client's own routes and requests do the work, on the loop thread of the process (`rmqkit.client.runtime.process`). A
process keeps one connection set per name servers and user, so a Python worker that is used again connects once. A
broker that does not answer is asked again for ``brokerPatienceMs``; what it says is believed at once, if it is the
master and has entered its whole log into queues.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from typing import TypeVar

from msgspec import Struct

from rmqkit.client.runtime.process import portal
from rmqkit.client.runtime.routes import MASTER_ID
from rmqkit.client.runtime.runtime import ClientRuntime
from rmqkit.client.runtime.settings import ClientSettings
from rmqkit.errors import BodyError, NoRoute, PeerRefused, RemotingError, RmqError
from rmqkit.filter import subscription
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.record import INNER_BATCH
from rmqkit.protocol.schemas.clients import MessageQueue
from rmqkit.protocol.schemas.pull import PullFlag, PullMessageRequest
from rmqkit.protocol.schemas.topics import ClusterInfo
from rmqkit.remoting.authentication import Credentials
from rmqkit.remoting.tls import Tls
from rmqkit.rpc import NameServers, Pulled, PullStatus
from rmqkit.spark.options import LiveOptions, words
from rmqkit.store.log import scan

T = TypeVar("T")

Offsets = dict[MessageQueue, int]
"""The next message of every queue: what was read lies before it."""

_log = logging.getLogger(__name__)

_RETRY_PAUSE_S = 0.5
_DISPATCH_PAUSE_S = 0.01
_CHUNK_BYTES = 4 << 20
_PASSING_CODES = (ResponseCode.SYSTEM_BUSY, ResponseCode.SERVICE_NOT_AVAILABLE)
_SAMPLE_COUNT = 16


class Range(Struct, frozen=True):
    """Messages of a queue: offsets from ``low`` up to ``high``."""

    queue: MessageQueue
    low: int
    high: int


class DataLost(RmqError):
    """Messages that were to be read are gone."""

    def __init__(self, queue: MessageQueue, low: int, high: int | None, why: str) -> None:
        which = f"messages from {low} on" if high is None else f"messages {low} to {high - 1}"
        super().__init__(
            f"{which} of queue {queue.queue_id} of {queue.topic} on {queue.broker_name} are gone:"
            f" {why}; failOnDataLoss=false goes on without them"
        )


class _NotYet(RmqError):
    """A queue is in no route, or ends before what was seen of it: its broker may be coming back."""

    def __init__(self, found: dict[MessageQueue, Bounds] | None = None, pulled: Pulled | None = None) -> None:
        super().__init__("a queue is not back as far as it was")
        self.found = found or {}
        self.pulled = pulled


class Bounds(Struct, frozen=True):
    """The bounds of a queue: the offset of its first message that is still stored, and one past its last."""

    low: int
    high: int


class Mark(Struct, frozen=True):
    """The place in the log and the store time of a message: a message of the same offset in a queue that was deleted
    and made again has others."""

    log_offset: int
    stored_ms: int


class BrokerPool:
    """Connections to the brokers behind some name servers; `source` and `sink` ask through it. Thread-safe: all work
    is done on the portal's loop."""

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
        """Return True if the connections belong to the process that this one was forked from."""
        return self._portal.is_from_parent

    @property
    def runtime(self) -> ClientRuntime:
        """The connections, for a producer beside these requests; to be used on the portal's loop."""
        return self._runtime

    def wait_dispatched(self, queues: Iterable[MessageQueue]) -> None:
        """Wait until every message that the brokers of some queues have stored so far can be pulled: the dispatcher
        enters messages into queues in the order of the log, some time after their sender was answered."""

        async def dispatched(queue: MessageQueue) -> None:
            # The end is taken once: a topic that others send to goes on growing, and would be waited for without end.
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
        """List the queues that can be read now of some topics, or of those whose whole name matches.
        Raises NoRoute: a named topic does not exist, or no name server answers."""
        return self._portal.run(lambda: self._queues(list(topics), pattern))

    def bounds(self, queues: Iterable[MessageQueue]) -> dict[MessageQueue, Bounds]:
        """Ask the brokers for the bounds of queues.
        Raises RemotingError, PeerRefused: a broker does not answer, or refuses."""
        return self._portal.run(lambda: self._bounds(queues))

    def reach(
        self, topics: Iterable[str], pattern: str, assigned: list[MessageQueue], begun: Offsets
    ) -> dict[MessageQueue, Bounds]:
        """Ask for the bounds of the wanted queues, and wait for those that were read before until they reach ``begun``
        again, but only while their broker is away or has not settled. A topic or queue that is gone is left out.
        Raises NoRoute, RemotingError, PeerRefused: as `queues` and `bounds`."""

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
                # Raised, so that `_patiently` asks again; when its time is over the caller judges what was found.
                raise _NotYet(found)
            return found

        try:
            return self._portal.run(lambda: self._patiently(reached) if begun else reached())
        except _NotYet as late:
            return late.found

    async def _has_settled(self, master: str | None) -> bool:
        """Return True if queues end where their broker says.
        A slave may lag, and a broker that was started again may still enter messages of its log into queues."""
        if master is None:
            return False
        try:
            end, dispatched = await self._log_ends(master)
        except PeerRefused:  # the user has no right to ask
            return False
        return dispatched >= end

    async def _is_gone(self, queue: MessageQueue, offset: int, master: str | None) -> bool:
        """Return True if the broker of a queue that is in no route does not have it.
        A name server alone does not prove it: it may have just started, and know only some topics yet."""
        if master is None:
            return False
        try:
            return await self._runtime.calls.max_offset(master, queue) < offset and await self._has_settled(master)
        except PeerRefused as error:
            return error.code == ResponseCode.TOPIC_NOT_EXIST

    async def _masters(self) -> dict[str, str]:
        """The addresses of the masters that a name server knows, by the names of their brokers."""
        name_servers = NameServers(self._runtime.name_servers, self._runtime.calls)
        try:
            cluster = await name_servers.fetch(ClusterInfo, RequestCode.GET_BROKER_CLUSTER_INFO)
        except (PeerRefused, BodyError):
            return {}
        brokers = cluster.broker_addr_table.items()
        return {name: data.broker_addrs[MASTER_ID] for name, data in brokers if MASTER_ID in data.broker_addrs}

    def marks(self, offsets: Offsets) -> dict[MessageQueue, Mark]:
        """Ask for the mark of the message before each offset. Queues without that message are left out.
        Raises RemotingError, PeerRefused: as `bounds`."""

        async def one(queue: MessageQueue, offset: int) -> Mark | None:
            try:
                pulled = await self._pull(queue, offset, 1, expression="*")
            except PeerRefused as error:
                if error.code == ResponseCode.TOPIC_NOT_EXIST:
                    return None
                raise
            records = scan.pulled(pulled.body) if pulled.status is PullStatus.FOUND else ()
            if not records:
                return None
            first = records.take(slice(0, 1))
            # Of a compacted topic a later message is given; a record of an inner batch has the offset of its first one.
            is_batch = bool(first.field("sys_flag")[0] & INNER_BATCH)
            if first.field("queue_offset")[0] != offset and not is_batch:
                return None
            return Mark(int(first.field("physical_offset")[0]), int(first.store_timestamps[0]))

        async def every() -> list[Mark | None]:
            asked = (functools.partial(one, queue, offset - 1) for queue, offset in wanted.items())
            return await asyncio.gather(*map(self._patiently, asked))

        wanted = {queue: offset for queue, offset in offsets.items() if offset > 0}
        found = self._portal.run(every) if wanted else []
        return {queue: mark for queue, mark in zip(wanted, found, strict=True) if mark is not None}

    def search(self, queue: MessageQueue, timestamp_ms: int) -> int:
        """Find the first message of a queue that was stored at or after a time; the queue's end when there is none."""

        async def found() -> int:
            return await self._runtime.calls.search_offset(await self._address(queue), queue, timestamp_ms)

        return self._portal.run(lambda: self._patiently(found))

    def commit(self, group: str, offsets: dict[MessageQueue, int]) -> None:
        """Save the offsets of a group at the brokers.
        Raises RemotingError, NoRoute, PeerRefused: a broker did not take it, or refused."""

        async def one(queue: MessageQueue, offset: int) -> None:
            calls, address = self._runtime.calls, await self._address(queue)
            try:
                await calls.commit_offset(address, group, queue, offset)
            except PeerRefused as error:
                if error.code != ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST:
                    raise
                await self._pull(queue, offset, 1)  # a broker of which nothing was read does not know the group yet
                await calls.commit_offset(address, group, queue, offset)

        async def every() -> None:
            saves = (self._patiently(functools.partial(one, *place)) for place in offsets.items())
            await asyncio.gather(*saves)

        self._portal.run(every)

    def mean_bytes(self, queue: MessageQueue, offset: int) -> float | None:
        """Measure the mean size in bytes of a few records from an offset on; None when nothing is there."""

        async def sample() -> Pulled:
            return await self._pull(queue, offset, _SAMPLE_COUNT)

        pulled = self._portal.run(lambda: self._patiently(sample))
        count = pulled.next_begin_offset - offset
        return len(pulled.body) / count if pulled.status is PullStatus.FOUND and count > 0 else None

    def bodies(self, part: Range) -> Iterator[bytes]:
        """Yield the stored records of a range of a queue, some MiB at a time; inner batches may reach out of it.
        Raises DataLost: some are gone and that is to fail. Raises RemotingError, PeerRefused: as `bounds`."""
        pieces = self._bodies(part)
        # One step of the generator per call: nothing is pulled ahead while the caller decodes, so a task holds one
        # chunk.
        while (body := self._portal.run(functools.partial(anext, pieces, b""))) != b"":
            yield body

    def report(self, lost: DataLost) -> None:
        """Raise that messages are gone, with ``failOnDataLoss``, or else write it to the log."""
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
                # A topic that a pattern found may be deleted before it is asked for; one that was named has to be
                # there.
                if pattern or not must_exist:
                    continue
                raise NoRoute(f"rocketmq: topic {topic} does not exist: create it, or send a message to it first")
            found += routes.subscribe_queues(topic)
        return found

    async def _bodies(self, part: Range) -> AsyncIterator[bytes]:
        """Yield what `_pulled` does, joined into chunks: decoding with Arrow has a cost per chunk, not per byte."""
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
                pulled = await self._patiently(functools.partial(self._pull_there, part.queue, offset, count))
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
            # Retention was quicker, and the broker says where the queue begins now. Only forward: going back would give
            # rows twice.
            elif pulled.status is PullStatus.OFFSET_ILLEGAL and pulled.next_begin_offset > offset:
                gone = min(pulled.next_begin_offset, part.high)
                self.report(DataLost(part.queue, offset, gone, f"the queue begins at {pulled.min_offset}"))
            before = offset
            # A filter may leave nothing of what was looked at, but an answer with messages has to move on.
            offset = max(pulled.next_begin_offset, offset + (pulled.status is PullStatus.FOUND))
            assert offset >= before, "a range is read forward"

    async def _pull_there(self, queue: MessageQueue, offset: int, count: int) -> Pulled:
        """Raises _NotYet: the queue ends before the offset, where it was said to have a message."""
        pulled = await self._pull(queue, offset, count)
        is_short = pulled.status is PullStatus.NO_NEW_MESSAGE or pulled.max_offset <= offset
        if is_short and pulled.status is not PullStatus.FOUND:
            raise _NotYet(pulled=pulled)
        return pulled

    async def _pull(self, queue: MessageQueue, offset: int, count: int, *, expression: str = "") -> Pulled:
        """Pull some messages, those that the options choose or those of an expression of tags."""
        options = self._options
        if expression:
            wanted = subscription(queue.topic, expression)
        else:
            wanted = subscription(queue.topic, options.expression, expression_type=options.expression_type)
        # Neither SUSPEND nor COMMIT_OFFSET: a task must not be held at the end of its range, and what was read is said
        # by the checkpoint, not by a pull.
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
        return await self._runtime.calls.pull(await self._address(queue), header, options.pull_timeout_ms)

    async def _log_ends(self, address: str) -> tuple[int, int]:
        """Ask a broker where its log ends, and where the part of it ends that was dispatched to queues."""
        figures = await self._runtime.calls.runtime_info(address)
        end = int(figures["commitLogMaxOffset"])
        return end, end - int(figures["dispatchBehindBytes"])

    async def _patiently(self, work: Callable[[], Awaitable[T]]) -> T:
        """Do some work, and do it again while a broker or the name servers do not answer."""
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
        return await self._runtime.routes.find_address(queue.broker_name, queue.topic)


_connected: dict[LiveOptions, BrokerPool] = {}


def broker_pool(options: LiveOptions) -> BrokerPool:
    """Get the connections of this process with some options; they are made when they are first asked for.
    Raises SettingsError: no name server is known. Raises NoRoute: none answers."""
    known = _connected.get(options)
    # Spark forks its Python workers from a daemon: what was connected there must not be used by two processes.
    if known is None or known.is_from_parent:
        known = _connected[options] = BrokerPool(options)
    return known


def wanted_topics(options: LiveOptions) -> list[str]:
    """List the topics that the options name."""
    return words(options.topics) + words(options.topic)

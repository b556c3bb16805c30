"""Stored messages sent again, from a topic, the dead letters of a group, or a store's files: ``rmq replay``.

===================  ================================================================================================
of a message         what the replayed one has
===================  ================================================================================================
body, tags, keys,    the same; so do properties of the application (`own_properties`)
flag, sharding key
unique key           ``replay id/place``: where it is in the source
topic                the target; of dead letters the retry topic of their group (`rmqkit.admin.replay.memory`);
                     without either, the topic that the message was first sent to
queue                any, or the one that its sharding key chooses
===================  ================================================================================================

After each chunk the `State` says where to go on. A run that was killed in the middle of a chunk may have sent a part
of it: the next one looks for its first unique keys in the target, until there is nothing of a whole chunk, and sends
what it does not find; only what the target's brokers do not index can be there twice. `rmqkit.spark.jobs.replay` is for
what is too much for one process.

A source, a topic at its brokers or the log of a store, has *lanes*, queues or the one log, each from an offset up to an
end, and gives the selected messages of its lanes in an order that is always the same. Lanes are asked for when a replay
begins: what is stored later, such as what a replay puts into its own source, is not read.
Source: behaviour.md §4, store.md §3, spark.md §6, §7.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import os
import random
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, field

from rmqkit.admin.calls import AdminCalls
from rmqkit.admin.messages.listing import Budget, page
from rmqkit.admin.messages.sending import (
    CHUNK_COUNT,
    ChunkProducer,
    OnWait,
    Pace,
    Silence,
    Stop,
    is_illegal,
    send_chunk,
)
from rmqkit.admin.replay.dead import DRY_RUN, check_by, kind_of, origin
from rmqkit.admin.replay.memory import Replayed, Retries, retry_of
from rmqkit.admin.tail import Span, queue_text
from rmqkit.client.consumer.pull import PullConsumer, PullResult
from rmqkit.client.observe.hooks import SendResult
from rmqkit.client.producer.selectors import PlacedMessage
from rmqkit.client.runtime.settings import ProducerSettings
from rmqkit.clock import SYSTEM_CLOCK, Clock
from rmqkit.errors import BodyError, MessageIllegal, NoNameServer, NoRoute, RemotingError, RmqError, SettingsError
from rmqkit.filter import matches_tags, subscription
from rmqkit.filter.sql92 import ExpressionRejected, compile_expression
from rmqkit.protocol.message import ReceivedMessage
from rmqkit.protocol.names import NOT_OF_APPLICATIONS, SYSTEM_TOPICS
from rmqkit.protocol.properties import SHARDING_KEY, encode_properties, own_properties
from rmqkit.protocol.schemas.clients import MessageQueue
from rmqkit.remoting.client import Backoff, Failures
from rmqkit.sentences import _, plain
from rmqkit.store.files import naming
from rmqkit.store.offline import check as fsck
from rmqkit.store.offline.findings import Finding
from rmqkit.store.settings import StoreSettings

_BATCH_COUNT = 32
_AUDIT_TAIL_BYTES = 1 << 20
_AUDIT_BEGIN = b'{"time":'

Outcome = SendResult | ReceivedMessage | RmqError
"""What became of a message: it was sent, a run before had sent it, or no broker takes it."""


class State(Struct, kw_only=True):
    """How far a replay is.

    Attributes:
        task: what is replayed; a state is not used for another task.
        lanes: next offset and end of each.
    """

    task: str
    replay_id: str
    lanes: Lanes
    sent: int = 0
    failed: int = 0
    is_done: bool = False

    @classmethod
    def load(cls, path: Path, task: str) -> State | None:
        """The state in a file; None when there is no file.
        Raises SettingsError: the file has something else, or the state of another replay."""
        _refuse_device(path)
        try:
            state = msgspec.json.decode(path.read_bytes(), type=cls)
        except FileNotFoundError:
            return None
        except msgspec.MsgspecError as error:
            raise SettingsError(
                _("{path} is not the state of a replay ({error}): name another file", path=path, error=error)
            ) from None
        if state.task != task:
            raise SettingsError(
                _(
                    "{path} is the state of another replay, {task}: name another file for {wanted}",
                    path=path,
                    task=state.task,
                    wanted=task,
                )
            )
        return state

    @classmethod
    async def begin(cls, task: str, source: TopicSource | StoreSource) -> State:
        """That of a replay that begins now."""
        return cls(task=task, replay_id=f"replay-{random.getrandbits(40):010x}", lanes=await source.lanes())

    def save(self, path: Path) -> None:
        """Replace the file as a whole; a power cut may bring an older one back, for which no chunk waits."""
        whole = path.with_name(path.name + ".tmp")
        with naming(path):
            whole.write_bytes(msgspec.json.format(msgspec.json.encode(self, enc_hook=plain)))
            whole.replace(path)


class Audit:
    """A file with a JSON line for each replayed message; what a killed run wrote of a line is taken off.
    Raises SettingsError: the file is something else. Raises OSError: it cannot be written."""

    def __init__(self, path: Path) -> None:
        _refuse_device(path)
        self._path = path
        self._file = open(path, "ab+")  # noqa: SIM115 - closed by `close`
        size = self._file.seek(0, os.SEEK_END)
        tail_at = self._file.seek(max(0, size - _AUDIT_TAIL_BYTES))
        whole, newline, torn = self._file.read().rpartition(b"\n")
        self._latest = whole + newline
        for line in (whole.rpartition(b"\n")[2], torn):
            if not _AUDIT_BEGIN.startswith(line[: len(_AUDIT_BEGIN)]):
                self._file.close()
                raise SettingsError(_("{path} does not end with a line of an audit: name another file", path=path))
        self._file.truncate(tail_at + len(self._latest))

    def write(self, lines: Sequence[dict[str, Any]], *, may_have: bool) -> None:
        """Add lines, but those that it ``may_have``."""
        with naming(self._path):
            for line in lines:
                if not (may_have and f'"{line["newMsgId"]}"'.encode() in self._latest):
                    self._file.write(msgspec.json.encode(line, enc_hook=plain) + b"\n")
            self._file.flush()

    def close(self) -> None:
        with naming(self._path):
            self._file.close()


def _refuse_device(path: Path) -> None:
    if path.exists() and not path.is_file():
        raise SettingsError(_("{path} is no regular file, and may never end: name another", path=path))


@dataclasses.dataclass
class Replay:
    """One run of a replay.

    Attributes:
        consumer: looks up what a run before this one may have sent.
        target: the topic to send to; None: a retry topic of ``retries``, or without these each message's `origin`.
        retries: the retry topics of the group to which the dead letters belong.
        memory: the dead letters that earlier runs have sent; they are skipped and counted in ``remembered``.
        state_path, memory_path: the files of state and memory; None: there is no file.
        is_unsure: whether messages may be in the target already.
        on_chunk: told after each chunk how many were sent, and why no broker takes others.
        on_wait: told of brokers that do not answer.
        found: messages that were in the target already.
    """

    source: TopicSource | StoreSource
    producer: ChunkProducer
    consumer: PullConsumer
    state: State
    target: str | None = None
    retries: Retries | None = None
    memory: Replayed | None = None
    state_path: Path | None = None
    memory_path: Path | None = None
    audit: Audit | None = None
    pace: Pace = dataclasses.field(default_factory=lambda: Pace(0))
    is_unsure: bool = False
    on_chunk: Callable[[int, list[RmqError]], None] = lambda sent, failures: None
    on_wait: OnWait = lambda who, up_to_ms: None
    clock: Clock = SYSTEM_CLOCK
    found: int = 0
    remembered: int = 0
    _certain_count: int = 0

    async def run(self, stop: Stop) -> None:
        """Send what is left; ``stop`` ends it behind a chunk.
        Raises RmqError: a message could not be sent for a reason that may pass; its chunk is not in the state."""
        # Before the first send: the id in it makes the keys by which a second run finds what this one has sent.
        if self.memory is not None:
            self.memory.is_done = False
        self._save()
        chunk: list[Picked] = []
        async for picked in self.source.read(self.state.lanes):
            if self.memory is not None and self.memory.has(picked.lane, picked.message.queue_offset):
                self.remembered += 1
                continue
            # Never within an inner batch: its messages share the place where the lane goes on behind them.
            if len(chunk) >= self.pace.chunk_count and picked.next_offset != chunk[-1].next_offset:
                await self._pass(chunk, stop)
                chunk = []
            chunk.append(picked)
        if chunk:
            await self._pass(chunk, stop)
        self.state.is_done = True
        if self.memory is not None:
            self.memory.is_done = True
        self._save()

    async def _pass(self, chunk: list[Picked], stop: Stop) -> None:
        with stop.held():
            outcomes = await self._send(chunk)
            # Before the state: a kill in between has the chunk looked at again, and lines that are there are not
            # written twice. The other way round they would be missing for good.
            if self.audit is not None:
                lines = [self._line(picked, outcome) for picked, outcome in zip(chunk, outcomes, strict=True)]
                self.audit.write(lines, may_have=self.is_unsure)
            failures = [one for one in outcomes if isinstance(one, RmqError)]
            found = sum(isinstance(one, ReceivedMessage) for one in outcomes)
            # As many as a chunk may have that are not there: a run before this one did not get here.
            self._certain_count = 0 if found else self._certain_count + len(chunk)
            self.is_unsure = self.is_unsure and self._certain_count < CHUNK_COUNT
            self.found += found
            self.state.failed += len(failures)
            self.state.sent += len(outcomes) - len(failures)
            for picked, outcome in zip(chunk, outcomes, strict=True):
                self.state.lanes[picked.lane] = (picked.next_offset, self.state.lanes[picked.lane][1])
                if self.memory is not None and not isinstance(outcome, RmqError):
                    self.memory.add(picked.lane, picked.message)
            self._save()
            self.on_chunk(len(outcomes) - len(failures) - found, failures)
        await self.pace.passed(len(chunk))

    async def _send(self, chunk: list[Picked]) -> list[Outcome]:
        """What became of each. Raises RmqError: one could not be sent for a reason that may pass."""
        outcomes: list[Outcome | None] = [None] * len(chunk)
        messages: dict[int, PlacedMessage] = {}
        for number, picked in enumerate(chunk):
            try:
                messages[number] = self._again(picked)
            except MessageIllegal as error:
                outcomes[number] = error
        if self.is_unsure:
            for number, found in zip(messages, await asyncio.gather(*map(self._find, messages.values())), strict=True):
                outcomes[number] = found
        left = [number for number, outcome in enumerate(outcomes) if outcome is None]
        again = [messages[number] for number in left]
        # Brokers refuse batches for retry topics.
        is_retry = self.target is None and self.retries is not None
        batch_count = 1 if is_retry else _BATCH_COUNT
        sent = await send_chunk(self.producer, again, batch_count=batch_count, on_wait=self.on_wait)
        for number, one in zip(left, sent, strict=True):
            if isinstance(one, RmqError) and not is_illegal(one):
                raise one
            outcomes[number] = one
        return [one for one in outcomes if one is not None]

    def _again(self, picked: Picked) -> PlacedMessage:
        message = picked.message
        topic = self.target or origin(message)
        if topic is None:
            which = _("message {id} of {topic}", id=message.msg_id, topic=message.topic)
            raise MessageIllegal(_("{which} does not say where it came from: name a target", which=which))
        if self.target is None and self.retries is not None:
            return retry_of(message, topic, self.retries, self._key(picked))
        return PlacedMessage(
            topic=topic,
            body=message.body,
            tags=message.tags,
            keys=message.keys,
            properties=own_properties(message.properties),
            flag=message.flag,
            sharding_key=message.properties.get(SHARDING_KEY),
            msg_id=self._key(picked),
        )

    def _key(self, picked: Picked) -> str:
        return f"{self.state.replay_id}/{picked.place}"

    async def _find(self, message: PlacedMessage) -> ReceivedMessage | None:
        """The message in its target, where a run before this one may have put it."""
        assert message.msg_id is not None, "replayed messages say where they come from"
        try:
            return await self.consumer.view_message(message.topic, message.msg_id)
        except NoNameServer:
            raise
        except NoRoute:
            return None

    def _line(self, picked: Picked, outcome: Outcome) -> dict[str, Any]:
        message = picked.message
        line = {"time": self.clock.now_ms(), "topic": message.topic, "place": picked.place, "msgId": message.msg_id}
        line |= {"offsetMsgId": message.offset_msg_id, "newMsgId": self._key(picked)}
        if isinstance(outcome, RmqError):
            return {**line, "error": str(outcome)}
        queue = (
            outcome.queue
            if isinstance(outcome, SendResult)
            else MessageQueue(outcome.topic, outcome.broker_name or "", outcome.queue_id)
        )
        place = f"{queue_text(queue)}:{outcome.queue_offset}"
        return {**line, "newTopic": queue.topic, "newPlace": place, "newOffsetMsgId": outcome.offset_msg_id}

    def _save(self) -> None:
        if self.memory is not None and self.memory_path is not None:
            self.memory.save(self.memory_path)
        if self.state_path is not None:
            self.state.save(self.state_path)


LOG = "log"
PATIENCE_MS = ProducerSettings().send_timeout_ms
"""How long a broker that is away is waited for: as long as for its sends."""

_SAMPLES_MAX = 5
_PAUSE_MS, _PAUSE_MS_MAX = 20.0, 2000.0
_PULL_COUNT = 64
_EXAMINED_COUNT = 1024
_FOREVER_MS = 1 << 62
_CLOCK_STEP_MS = 60_000
"""Brokers' clocks may go back so far between two messages of a queue."""

Lanes = dict[str, tuple[int, int]]
"""Next offset and end of each lane; the offset in the log is physical, and its end a store time in ms."""


class Selection(Struct, frozen=True):
    """Which messages; without a topic all of a store but those of the system, of retries and dead letters. Times are
    bounds of ``storeTimestamp`` in ms; ``tags`` is ``A || B``, ``sql`` an SQL92 text; one of ``keys`` is enough.
    ``kinds`` are names of `rmqkit.admin.replay.dead.kind_of`, distinguished ``by``; ``kind_parts`` are texts that the
    name of a kind contains. One of both is enough; without any, all kinds are selected."""

    topic: str | None = None
    begin_ms: int = 0
    end_ms: int | None = None
    keys: tuple[str, ...] = ()
    tags: str = "*"
    sql: str = ""
    by: str = "kind"
    kinds: tuple[str, ...] = ()
    kind_parts: tuple[str, ...] = ()

    def test(self) -> Callable[[ReceivedMessage], bool]:
        """Whether a message is selected. Raises SettingsError: an expression cannot be understood."""
        try:
            tags = subscription(self.topic or "*", self.tags)
            expression = compile_expression(self.sql) if self.sql else None
        except (ValueError, ExpressionRejected) as error:
            raise SettingsError(_("replay: {error}", error=error)) from None
        keys, end_ms = set(self.keys), _FOREVER_MS if self.end_ms is None else self.end_ms
        by, kinds, parts = check_by(self.by), frozenset(self.kinds), self.kind_parts

        def is_of_kind(message: ReceivedMessage) -> bool:
            kind = kind_of(message, by)
            return kind in kinds or any(part in kind for part in parts)

        def is_selected(message: ReceivedMessage) -> bool:
            topic = message.topic
            is_of_topic = (
                topic == self.topic
                if self.topic is not None
                else topic not in SYSTEM_TOPICS and not topic.startswith(NOT_OF_APPLICATIONS)
            )
            return (
                is_of_topic
                and self.begin_ms <= message.store_timestamp <= end_ms
                and (not keys or not keys.isdisjoint((message.msg_id, *message.keys)))
                and matches_tags(tags, message.tags)
                and (expression is None or expression.matches(encode_properties(message.properties)))
                and (not (kinds or parts) or is_of_kind(message))
            )

        return is_selected


class Picked(Struct):
    """A selected message, its lane, and where the lane goes on behind it; all of an inner batch go on at one place."""

    message: ReceivedMessage
    lane: str
    next_offset: int

    @property
    def place(self) -> str:
        """Lane and offset; of an inner batch's member with its number in the queue."""
        if self.lane == LOG:
            return f"{LOG}:{self.message.physical_offset}:{self.message.queue_offset}"
        return f"{self.lane}:{self.message.queue_offset}"


class Sample(Struct, rename="camel"):
    """A message of a dry run: where it is, ``broker:queue:offset``, and the topic it would go to."""

    place: str
    to: str
    kind: str


class Preview(Struct, rename="camel", kw_only=True):
    """A dry run: what a replay would send.

    Attributes:
        count: messages that are selected, of those that were examined.
        targets: how many go to each topic; the empty name is of those that do not say where they came from.
        kinds: how many are of each kind.
        doubles: messages whose unique key was there before: all of them are sent.
        samples: the first ones.
        examined: how many were looked at.
        is_whole: whether everything was looked at.
        remembered: how many are selected and were replayed before; they are not counted in ``count``.
        troubles: queues that could not be read, each with the reason.
    """

    count: int = 0
    remembered: int = 0
    targets: dict[str, int] = field(default_factory=dict)
    kinds: dict[str, int] = field(default_factory=dict)
    doubles: int = 0
    samples: list[Sample] = field(default_factory=list)
    examined: int = 0
    is_whole: bool = True
    troubles: list[str] = field(default_factory=list)

    def add(self, message: ReceivedMessage, to: str, by: str, seen: set[str]) -> None:
        """Count a message that would go to a topic; ``seen`` are the unique keys of the messages before it."""
        kind = kind_of(message, by)
        self.count += 1
        self.targets[to] = self.targets.get(to, 0) + 1
        self.kinds[kind] = self.kinds.get(kind, 0) + 1
        self.doubles += message.msg_id in seen
        seen.add(message.msg_id)
        if len(self.samples) < _SAMPLES_MAX:
            place = f"{message.broker_name}:{message.queue_id}:{message.queue_offset}"
            self.samples.append(Sample(place, to, kind))


async def preview(
    calls: AdminCalls,
    selection: Selection,
    target: str | None,
    budget: Budget = DRY_RUN,
    *,
    retries: Retries | None = None,
    memory: Replayed | None = None,
) -> Preview:
    """Make a dry run over a topic, as far as a budget lets messages be examined, the oldest first; nothing is sent.
    ``target``, ``retries``, ``memory``: as of `Replay`.
    Raises what `rmqkit.admin.messages.listing.page` raises."""
    assert selection.topic is not None, "a dry run of a store is its command's"
    is_selected, span = selection.test(), Span(begin_ms=selection.begin_ms, end_ms=selection.end_ms)
    found = await page(calls, selection.topic, span, newest_first=False, count=budget.messages, budget=budget)
    shown, seen = Preview(examined=found.examined, is_whole=not found.cursor, troubles=found.troubles), set[str]()
    for message in found.messages:
        if not is_selected(message):
            continue
        lane = f"{message.broker_name}:{message.queue_id}"
        if memory is not None and memory.has(lane, message.queue_offset):
            shown.remembered += 1
        else:
            shown.add(message, destination(message, target, retries), selection.by, seen)
    return shown


def destination(message: ReceivedMessage, target: str | None, retries: Retries | None) -> str:
    """Return the topic to which a message is sent, or "" if it does not say where it came from."""
    first = origin(message)
    if target is not None or first is None or retries is None:
        return target or first or ""
    return retries.topic(first)


class TopicSource:
    """A topic at its brokers, queue by queue.

    Args:
        on_wait: told of a broker that does not answer.
    """

    def __init__(
        self,
        consumer: PullConsumer,
        topic: str,
        selection: Selection,
        on_wait: OnWait = lambda who, up_to_ms: None,
    ) -> None:
        self._consumer = consumer
        self._topic = topic
        self._selection = selection
        self._on_wait = on_wait
        self._is_selected = selection.test()

    async def lanes(self) -> Lanes:
        """Raises NoRoute: there is no such topic."""
        queues = await self._consumer.queues(self._topic)
        return {queue_text(queue): await self._bounds(queue) for queue in queues}

    async def _bounds(self, queue: MessageQueue) -> tuple[int, int]:
        consumer, begin_ms = self._consumer, self._selection.begin_ms
        first = consumer.search_offset(queue, begin_ms) if begin_ms else consumer.min_offset(queue)
        low, high = await asyncio.gather(first, consumer.max_offset(queue))
        return low, high

    async def read(self, lanes: Lanes) -> AsyncIterator[Picked]:
        """Raises RemotingError, PeerRefused: a broker does not give its messages, tried for `PATIENCE_MS`.
        Raises BodyError: the body of a message is damaged."""
        end_ms = (self._selection.end_ms or _FOREVER_MS) + _CLOCK_STEP_MS
        for lane, (offset, end) in lanes.items():
            broker_name, __, queue_id = lane.rpartition(":")
            queue = MessageQueue(self._topic, broker_name, int(queue_id))
            while offset < end:
                pulled = await self._pull(queue, offset)
                for damaged in pulled.unreadable:
                    place = _(
                        "message {id} at offset {offset} of {queue}",
                        id=damaged.msg_id,
                        offset=damaged.queue_offset,
                        queue=queue,
                    )
                    raise BodyError(
                        _("{place} cannot be unpacked: replay the messages before and after it", place=place)
                    )
                for message in pulled.messages:
                    if message.store_timestamp > end_ms:
                        end = min(end, message.queue_offset)
                    if offset <= message.queue_offset < end and self._is_selected(message):
                        yield Picked(message, lane, message.queue_offset + 1)
                # An offset that does not rise would be pulled for ever.
                if pulled.next_begin_offset <= offset:
                    break
                offset = pulled.next_begin_offset

    async def _pull(self, queue: MessageQueue, offset: int) -> PullResult:
        """Pull, and retry for as long as a producer would try to send. Raise the cause of most failures."""
        loop, backoff, failures = asyncio.get_running_loop(), Backoff(_PAUSE_MS, _PAUSE_MS_MAX), Failures()
        deadline = loop.time() + PATIENCE_MS / 1000
        with Silence(lambda: self._on_wait(_("broker {broker}", broker=queue.broker_name), PATIENCE_MS)):
            while True:
                try:
                    return await self._consumer.pull(queue, offset, self._selection.tags, max_count=_PULL_COUNT)
                except (RemotingError, NoRoute) as error:
                    failures.note(error)
                    if loop.time() >= deadline:
                        raise failures.cause from None
                await asyncio.sleep(backoff.next_ms() / 1000)


class StoreSource:
    """The log of a store, whose broker may be at work: then only what was stored when the replay began.

    Args:
        on_damage: told of what is no record, and of messages whose body changed on the disk: these are left out.
    """

    def __init__(
        self, root: Path, selection: Selection, settings: StoreSettings | None, on_damage: Callable[[Finding], None]
    ) -> None:
        self._root = root
        self._selection = selection
        self._settings = settings
        self._on_damage = on_damage

    async def lanes(self) -> Lanes:
        return {LOG: (0, SYSTEM_CLOCK.now_ms() if fsck.is_held(self._root, read_only=True) else _FOREVER_MS)}

    async def read(self, lanes: Lanes) -> AsyncIterator[Picked]:
        """Raises StoreError, OSError: there is no readable store."""
        is_selected = self._selection.test()
        ((offset, end_ms),) = lanes.values()
        messages = fsck.dump(
            self._root,
            self._settings,
            begin_ms=self._selection.begin_ms,
            end_ms=end_ms,
            begin_offset=offset,
            read_only=True,
            verify_crc=True,
            on_damage=self._on_damage,
        )
        while some := await asyncio.to_thread(lambda: list(itertools.islice(messages, _EXAMINED_COUNT))):
            for message in some:
                if is_selected(message):
                    yield Picked(message, LOG, message.physical_offset + message.store_size)

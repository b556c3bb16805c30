"""The replay of messages from a topic, from the dead letters of a group, or from a store (``rmq replay``).

===================  ================================================================================================
of a message         in the replayed message
===================  ================================================================================================
body, tags, keys,    unchanged, as are the properties of the application (`rmqkit.protocol.message.copied`)
flag, sharding key
unique key           ``replay id/place``, with the place of the message in the source
topic                the target if there is one; otherwise a retry topic of the group for dead letters
                     (`rmqkit.admin.replay.retries`), and for others the topic to which they were first sent
queue                any queue, or the queue for its sharding key
===================  ================================================================================================

`opened` creates a `Replay` from a `Plan`, with its source, state, memory, producer and audit. The command and the web
console only fill in the plan, run the replay and show its progress.

After each chunk, the `State` has the next offsets. A run that was killed in the middle of a chunk may have sent a part
of the chunk. The next run therefore looks up its messages by unique key in the target, and sends only the missing ones.
The look-up stops after a whole chunk of missing messages. Only messages that the target's brokers do not index can be
stored twice. `rmqkit.spark.jobs.replay` is for more messages than one process can send.
Source: behaviour.md §4, store.md §3.
"""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, closing
from pathlib import Path
from typing import Any

from msgspec import Struct, structs

from rmqkit.admin import Admin
from rmqkit.admin.messages.sending import CHUNK_COUNT, ChunkProducer, OnWait, Pace, Stop, is_illegal, send_chunk
from rmqkit.admin.replay.dead import origin
from rmqkit.admin.replay.memory import Memory
from rmqkit.admin.replay.retries import GroupProducer, Retries, retry_of
from rmqkit.admin.replay.selection import Selection
from rmqkit.admin.replay.sources import Picked, StoreSource, TopicSource
from rmqkit.admin.replay.state import Audit, State
from rmqkit.client.consumer.pull import PullConsumer
from rmqkit.client.observe.hooks import SendResult
from rmqkit.client.producer.producer import Producer
from rmqkit.client.producer.selectors import PlacedMessage
from rmqkit.client.runtime.runtime import ClientRuntime
from rmqkit.client.runtime.settings import ProducerSettings, PullConsumerSettings
from rmqkit.clock import SYSTEM_CLOCK, Clock
from rmqkit.errors import MessageIllegal, NoNameServer, NoRoute, RmqError
from rmqkit.protocol.message import ReceivedMessage, copied
from rmqkit.protocol.names import TOOLS_GROUP
from rmqkit.protocol.schemas.clients import MessageQueue, queue_text
from rmqkit.sentences import _
from rmqkit.store.offline.findings import Finding
from rmqkit.store.settings import StoreSettings

__all__ = ["Plan", "Replay", "opened"]

_BATCH_COUNT = 32
_GROUP = "rmq-replay"

Outcome = SendResult | ReceivedMessage | RmqError
"""The outcome for a message: sent now (`SendResult`), found in the target, or refused (`RmqError`)."""


class Plan(Struct, kw_only=True):
    """The options of a replay.

    Attributes:
        task: a description of the messages to replay. A state of another task is refused.
        selection: the selection of messages. Its topic is the source if there is no ``store``.
        group: the group of the dead letters; None: the messages are not dead letters.
        target: the topic to send to; None: a retry topic of the group, or without a group the `origin` of each message.
        store: a store directory to read instead of a topic.
        memory: the file with the dead letters that earlier runs have sent, and its task. These letters are skipped.
        is_again: True to ignore the content of the memory, unless a state shows that this replay has begun.
        state, audit: the paths of these files; None: there is no file.
        rate: the maximum of messages per second; 0: no limit.
        is_dry_run: True to open the replay without locking or writing a file, and without sending a message.
    """

    task: str
    selection: Selection
    group: str | None = None
    target: str | None = None
    store: Path | None = None
    store_settings: StoreSettings | None = None
    memory: tuple[Path, str] | None = None
    is_again: bool = False
    state: Path | None = None
    audit: Path | None = None
    rate: float = 0
    is_dry_run: bool = False


@asynccontextmanager
async def opened(
    plan: Plan,
    runtime: ClientRuntime,
    admin: Admin,
    *,
    reading: PullConsumerSettings,
    sending: ProducerSettings,
    group: str = TOOLS_GROUP,
    on_chunk: Callable[[int, list[RmqError]], None] = lambda sent, failures: None,
    on_wait: OnWait = lambda who, up_to_ms: None,
    on_damage: Callable[[Finding], None] = lambda finding: None,
) -> AsyncIterator[Replay]:
    """Open the source, the files and the clients, and yield the replay. ``group`` is the consumer group of its reads.
    Raises SettingsError: a file belongs to another replay, or the group does not read a retry topic."""
    async with AsyncExitStack() as stack:
        consumer = await stack.enter_async_context(PullConsumer(group, settings=reading, runtime=runtime))
        # Brokers have accepted these messages before, so no body is too large.
        sending = structs.replace(sending, limits=structs.replace(sending.limits, message_bytes_max=sys.maxsize))
        producer = Producer(_GROUP, settings=sending, runtime=runtime)
        if not plan.is_dry_run:
            await stack.enter_async_context(producer)
        topic = plan.selection.topic or ""
        source: TopicSource | StoreSource
        if plan.store is None:
            source = TopicSource(consumer, topic, plan.selection, on_wait)
        else:
            source = StoreSource(plan.store, plan.selection, plan.store_settings, on_damage)
        if plan.memory is not None and not plan.is_dry_run:
            stack.enter_context(Memory.held(plan.memory[0]))
        state = None if plan.state is None else State.load(plan.state, plan.task)
        memory = None if plan.memory is None else Memory.load(*plan.memory)
        if memory is not None and plan.is_again and state is None:
            memory = Memory.new(memory.task)
        if memory is not None:
            await memory.forget_deleted(consumer, topic)
        is_unsure = state is not None or (memory is not None and not memory.is_done)
        if state is None:
            state = await State.begin(plan.task, source)
            state.replay_id = state.replay_id if memory is None else memory.replay_id
        retries = await Retries.find(admin, plan.group) if plan.group is not None and plan.target is None else None
        audit = None
        if plan.audit is not None and not plan.is_dry_run:
            audit = stack.enter_context(closing(Audit(plan.audit)))
        yield Replay(
            source,
            producer if retries is None else GroupProducer(producer, runtime, admin, retries),
            consumer,
            state,
            target=plan.target,
            retries=retries,
            memory=memory,
            state_path=plan.state,
            memory_path=None if plan.memory is None else plan.memory[0],
            audit=audit,
            pace=Pace(plan.rate),
            is_unsure=is_unsure,
            on_chunk=on_chunk,
            on_wait=on_wait,
        )


@dataclasses.dataclass
class Replay:
    """One run of a replay.

    Attributes:
        consumer: the consumer that looks up messages that an earlier run may have sent.
        target: the topic to send to; None: a retry topic of ``retries``, or (without retries) the `origin` of each
            message.
        retries: the retry topics of the group to which the dead letters belong.
        memory: the dead letters that earlier runs have sent. The replay skips them.
        state_path, memory_path: the files of state and memory; None: there is no file.
        is_unsure: True if messages may already be in the target.
        on_chunk: a function that is called after each chunk, with the number of sent messages and the errors of refused
            messages.
        on_wait: a function that is called if a broker does not answer.
        remembered: the number of dead letters that were skipped because the memory has them.
        found: the number of messages that were already in the target.
    """

    source: TopicSource | StoreSource
    producer: ChunkProducer
    consumer: PullConsumer
    state: State
    target: str | None = None
    retries: Retries | None = None
    memory: Memory | None = None
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
        """Send the remaining messages. ``stop`` takes effect at the end of a chunk.
        Raises RmqError: a message could not be sent because of a temporary error. The state does not have its chunk."""
        # Save before the first send: the next run needs the replay id to find the messages of this run.
        if self.memory is not None:
            self.memory.is_done = False
        self._save()
        chunk: list[Picked] = []
        async for picked in self.selected():
            # Never split an inner batch, because all its messages have the same next offset.
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

    async def selected(self) -> AsyncIterator[Picked]:
        """Yield the remaining messages. Skip and count the messages in the memory."""
        async for picked in self.source.read(self.state.lanes):
            if self.memory is not None and self.memory.has(picked.lane, picked.message.queue_offset):
                self.remembered += 1
            else:
                yield picked

    async def _pass(self, chunk: list[Picked], stop: Stop) -> None:
        with stop.held():
            outcomes = await self._send(chunk)
            # Write the audit before the state. After a kill in between, the next run repeats the chunk and skips the
            # lines that exist. In the other order, the lines would never be written.
            if self.audit is not None:
                lines = [self._line(picked, outcome) for picked, outcome in zip(chunk, outcomes, strict=True)]
                self.audit.write(lines, may_have=self.is_unsure)
            failures = [one for one in outcomes if isinstance(one, RmqError)]
            found = sum(isinstance(one, ReceivedMessage) for one in outcomes)
            # A whole chunk of missing messages shows that the earlier run did not reach this place.
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
        """Send copies of messages and return the outcomes. Raises RmqError: a send failed with a temporary error."""
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
            raise MessageIllegal(_("{which} has no original topic: name a target", which=which))
        if self.target is None and self.retries is not None:
            return retry_of(message, topic, self.retries, self._key(picked))
        return PlacedMessage(topic=topic, msg_id=self._key(picked), **copied(message))

    def _key(self, picked: Picked) -> str:
        return f"{self.state.replay_id}/{picked.place}"

    async def _find(self, message: PlacedMessage) -> ReceivedMessage | None:
        """Return the message from the target if an earlier run has sent the message; otherwise None."""
        assert message.msg_id is not None, "a replayed message has a unique key"
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

"""A consumer as a member of its group: its subscriptions, its queues, and a pull loop for each queue.

::

    routes, members change ──> Rebalance ──> AssignedQueues: one PullLoop per queue ──> ProcessQueue ──> ConsumeService
                                                                                                    └── QueueWatch:
                                                                                                    which queues do not
                                                                                                    advance, and why

`Consumer` is the common base of push, pull and pop consumers. Its `GroupCoordinator` decides when to rebalance and
registers the member with the brokers. The module `assignment` computes the queues of each member, and takes and gives
up queues. In ordered consumption, a queue is taken after its broker has locked it. If another member gets the lock, the
queue restarts with the next rebalance. Use this module only on the event loop. Source: behaviour.md §6.1, §6.2, §8.3,
§8.4, §8.15.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from types import TracebackType

from rmqkit.client.consumer.assignment import AssignedQueues, Rebalance
from rmqkit.client.consumer.context import ConsumerContext, Subscriptions
from rmqkit.client.consumer.loop import PullSchedule
from rmqkit.client.consumer.offsets import LocalOffsetStore, OffsetStore, RemoteOffsetStore
from rmqkit.client.consumer.poll import MessageStream, StreamSource
from rmqkit.client.consumer.process_queue import ProcessQueue
from rmqkit.client.consumer.watch import QueueWatch
from rmqkit.client.observe.hooks import BackgroundHook
from rmqkit.client.observe.status import MemberStatus
from rmqkit.client.runtime.lifecycle import Client
from rmqkit.client.runtime.runtime import ClientRuntime
from rmqkit.client.runtime.settings import ConsumerSettings, Tracing
from rmqkit.errors import ClientError, RmqError
from rmqkit.filter import TAG
from rmqkit.protocol.codes import CURRENT_VERSION, version_name
from rmqkit.protocol.message import ReceivedMessage
from rmqkit.protocol.names import retry_topic, with_namespace
from rmqkit.protocol.schemas.clients import (
    ConsumeMessageDirectlyResult,
    ConsumerData,
    ConsumerRunningInfo,
    MessageQueue,
    PopProcessQueueInfo,
    ProcessQueueInfo,
)
from rmqkit.remoting.tasks import Tasks, keep_doing
from rmqkit.settings import to_properties

_log = logging.getLogger(__name__)
QueueListener = Callable[[set[MessageQueue], set[MessageQueue]], object]
"""A function that is called on the loop with all queues of a topic and this member's queues
(``MessageQueueListener``).
"""

_INCOMPLETE_PAUSE_MS = 1000.0
_LOCK_PAUSE_MS = 500.0
_MIB = 1 << 20
_SECRETS = frozenset(("accessKey", "secretKey", "securityToken"))


def offsets_of(runtime: ClientRuntime, group: str, settings: ConsumerSettings) -> OffsetStore:
    """Create the offset store of a group. Offsets are stored on the brokers or, in broadcasting, in a file."""
    if settings.is_broadcasting:
        return LocalOffsetStore(settings.offsets_dir, runtime.client_id, with_namespace(runtime.namespace, group))
    return RemoteOffsetStore(runtime, group)


class GroupCoordinator:
    """Coordinator of one member of a group. It decides when to rebalance, and registers the member with the brokers.
    ``subscriptions`` are the member's subscriptions, ``assigned`` are its queues, and ``process_queues`` hold the
    messages of these queues."""

    def __init__(self, context: ConsumerContext) -> None:
        self._context = context
        self._runtime = context.runtime
        self.subscriptions = Subscriptions(context.runtime, context.group)
        self.assigned = self._make_queues()
        self.process_queues = self.assigned.process_queues
        self._rebalance = self._make_rebalance()
        self._manual: set[MessageQueue] | None = None
        self._unlocked: set[MessageQueue] = set()
        self._refused: set[MessageQueue] = set()
        self._watch = QueueWatch(context, self.assigned, lambda: self._unlocked)
        self._listeners: dict[str, tuple[QueueListener, tuple[set[MessageQueue], set[MessageQueue]]]] = {}
        self._tasks = Tasks()
        self._wake = asyncio.Event()
        self._is_shared_out = asyncio.Event()
        self._is_open = False
        self._opened_ms = 0

    def _make_queues(self) -> AssignedQueues:
        return AssignedQueues(self._context, self.subscriptions, self.rebalance_soon)

    def _make_rebalance(self) -> Rebalance:
        return Rebalance(self._context, self)

    # -- subscriptions

    def subscribe(self, topic: str, expression: str, expression_type: str) -> None:
        """Subscribe to a topic, or replace its subscription. Raises SettingsError: the topic or the expression is not
        valid.
        """
        self.subscriptions.put(topic, expression, expression_type)
        if self._is_open:
            self._runtime.routes.watch(topic, self._context.group)
            self._runtime.refresh_routes_soon()
            self._announce_change()

    def unsubscribe(self, topic: str) -> None:
        if self.subscriptions.pop(topic, None) is not None and self._is_open:
            self._runtime.routes.unwatch(topic, self._context.group)
            self._announce_change()

    def assign(self, queues: Collection[MessageQueue], expression: str, expression_type: str) -> None:
        """Read these queues independently of other members, instead of subscribing.

        Raises SettingsError: the same as for `subscribe`.
        """
        self._manual = set(queues)
        for topic in {queue.topic for queue in queues}:
            self.subscribe(topic, expression, expression_type)
        self.rebalance_soon()

    def schedule(self, topic: str, schedule: PullSchedule) -> None:
        """Let the program pull the queues of a topic itself. Raises SettingsError: the same as for `subscribe`."""
        self.subscribe(topic, "*", TAG)
        self.assigned.schedules[topic] = schedule

    def listen(self, topic: str, listener: QueueListener) -> None:
        """Call a listener with the queues of a topic, now and after each change."""
        self._listeners[topic] = (listener, (set(), set()))
        self.rebalance_soon()

    @property
    def is_manual(self) -> bool:
        return self._manual is not None

    async def start_at(self, queue: MessageQueue, offset: int) -> None:
        """Restart a queue at an offset, and drop its pulled messages.
        Raises ClientError: this member does not own the queue."""
        is_ours = queue in self.process_queues or queue in (self._manual or ())
        if not is_ours or not await self.assigned.start_at(queue, offset, is_member=not self.is_manual):
            raise ClientError(
                f"{queue} is not owned by this member of group {self._context.group}: wait until it is, or assign it"
            )

    # -- start and stop

    async def open(self, *, is_late: bool = False) -> None:
        """Join the group at the brokers, and rebalance for the first time. Return when the start offset of each queue
        is known, so that messages that the program sends next are not skipped. With ``is_late`` the program has already
        started: return before the rebalance, and only log an error. Consumption then begins when a broker answers.
        Raises NoRoute: no name server answered.
        Raises PeerRefused: a broker cannot filter by an expression."""
        self._is_open = True
        self._opened_ms = self._runtime.clock.now_ms()
        try:
            await self._refresh_routes()
        except RmqError as error:
            if not is_late:
                raise
            _log.warning("subscriptions of group %s: %s", self._context.group, error)
            self._runtime.refresh_routes_soon()
        # Do this before the first rebalance: a broker lists a member only after it has received a heartbeat.
        await self._runtime.heartbeat()
        name = f"rebalance of group {self._context.group}"
        self._tasks.start(keep_doing(self._rebalanced, wake=self._wake, name=name), name)
        self._tasks.start(self._save_offsets(), f"offsets of group {self._context.group}")
        self._tasks.start(self._watch.run(), f"watchdog of group {self._context.group}")
        # A scheduled pull finds its start offset itself. It may close the consumer while it still starts here.
        if not is_late and not self.assigned.schedules:
            await self._is_shared_out.wait()
            await self.assigned.begun()

    async def stop(self) -> None:
        self._is_open = False
        # Stop the rebalance first. Otherwise it would take queues again while they are stopped.
        await self._tasks.close()
        await self.assigned.stop()
        self._is_shared_out.set()

    async def leave(self, still_handled: Collection[MessageQueue] = ()) -> None:
        """Save the offsets, release the locks of all queues that no handler uses any more, and leave the group."""
        assert not self._is_open, "a member stops before it leaves"
        # Keep this order: offsets, locks, group. Then no offset changes after the next owner of a queue has read it.
        await self._context.offsets.save_all()
        if self._context.locks is not None:
            for queue in still_handled:
                _log.warning(
                    "group %s: the handler of %s is still at work in its thread, so no other member may have the queue "
                    "until the broker's lock ends, 60 s after it was last renewed: allow it more than drain_ms",
                    self._context.group,
                    queue,
                )
            await self._context.locks.unlock(self._context.locks.asked.difference(still_handled))
        for topic in self.subscriptions:
            self._runtime.routes.unwatch(topic, self._context.group)
        if not self.is_manual:
            await self._runtime.unregister_consumer(self._context.group)

    # -- called by the runtime and the rebalance

    def consumer_data(self) -> ConsumerData | None:
        if not self.subscriptions:
            return None
        return ConsumerData(
            group_name=self._context.group,
            consume_type=self._context.consume_type,
            message_model=self._context.settings.message_model.value,
            consume_from_where=self._context.settings.start_from.value,
            subscription_data_set=list(self.subscriptions.values()),
        )

    def rebalance_soon(self) -> None:
        self._wake.set()

    def held_queues(self) -> set[MessageQueue]:
        return set(self.process_queues)

    async def change_queues(self, taken: list[MessageQueue], given_up: list[MessageQueue], *, is_shared: bool) -> None:
        """Give up queues, send the newest subscriptions to the brokers, then start to pull the new queues.
        ``is_shared`` is True if the group has other clients."""
        await asyncio.gather(*(self.assigned.give_up(queue) for queue in given_up))
        self.subscriptions.renew_versions({queue.topic for queue in (*taken, *given_up)})
        if not self.is_manual:
            # Do this before the first pull: a broker refuses a pull with an unknown subscription.
            await self._runtime.heartbeat()
        if self._context.locks is not None and taken:
            await self._context.locks.lock(taken)
            self._refused.update(queue for queue in taken if not self._context.locks.is_held(queue))
            taken = [queue for queue in taken if self._context.locks.is_held(queue)]
        # A former owner with a lock has saved its offset before it released the lock.
        pause_ms = (
            float(self._context.settings.take_over_pause_ms) if is_shared and self._context.locks is None else 0.0
        )
        self.assigned.take(taken, pause_ms=pause_ms, is_member=not self.is_manual)

    async def reset_offsets(self, offsets: dict[MessageQueue, int]) -> None:
        """Set the offsets of the group for an operator: wait until handlers have finished, then restart the queues at
        these offsets."""
        held = [(queue, offset) for queue, offset in offsets.items() if queue in self.process_queues]
        await asyncio.gather(*(self.assigned.reset(queue, offset) for queue, offset in held))
        self.rebalance_soon()

    def offsets_of(self, topic: str) -> dict[MessageQueue, int]:
        known = {queue: self._context.offsets.known(queue) for queue in self.process_queues if queue.topic == topic}
        return {queue: offset for queue, offset in known.items() if offset is not None}

    def status(self, state: str) -> MemberStatus:
        """Return the state of every queue. ``state`` is the state of the client."""
        queues_of = self._runtime.routes.subscribe_queues
        wanted = sorted(self.subscriptions.keys() - {retry_topic(self._context.group)}) if self._is_open else ()
        return MemberStatus(
            group=self._context.group,
            client_id=self._runtime.client_id,
            state=state,
            queues=self._watch.statuses(),
            missing_topics=[topic for topic in wanted if not queues_of(topic)],
        )

    def running_info(self) -> ConsumerRunningInfo:
        """Return the settings, the subscriptions, the held messages of each queue, the statistics, and the reasons why
        queues do not advance."""
        own = {
            "PROP_NAMESERVER_ADDR": ";".join(self._runtime.name_servers),
            "PROP_CONSUME_TYPE": self._context.consume_type,
            "PROP_CONSUMEORDERLY": str(self._context.is_ordered).lower(),
            "PROP_THREADPOOL_CORE_SIZE": str(getattr(self._context.settings, "handlers_max", 0)),
            "PROP_CONSUMER_START_TIMESTAMP": str(self._opened_ms),
            "PROP_CLIENT_VERSION": version_name(CURRENT_VERSION),
        }
        settings = {key: text for key, text in to_properties(self._context.settings).items() if key not in _SECRETS}
        now_ms, stats = self._runtime.clock.monotonic_ms(), self.assigned.stats
        return ConsumerRunningInfo(
            properties=settings | own,
            subscription_set=list(self.subscriptions.values()),
            mq_table={queue: self._queue_info(one) for queue, one in self.process_queues.items() if not one.is_popped},
            mq_pop_table={
                queue: PopProcessQueueInfo(
                    wait_ack_count=len(one), droped=one.is_dropped, last_pop_timestamp=one.pulled_ms
                )
                for queue, one in self.process_queues.items()
                if one.is_popped
            },
            status_table={topic: stats[topic].status(now_ms) for topic in self.subscriptions if topic in stats},
            user_consumer_info={
                f"{one.queue.topic} {one.queue.broker_name} {one.queue.queue_id}": f"{one.state.value}: {one.reason}"
                for one in self._watch.statuses()
                if one.reason
            },
        )

    async def consume_directly(self, message: ReceivedMessage) -> ConsumeMessageDirectlyResult:
        return await self._context.consume_service.consume_directly(message)

    async def renew_locks(self) -> None:
        """Renew the locks of all queues that are not being given up. Restart a queue if another member has its lock."""
        if self._context.locks is not None:
            # If a queue is being given up, do not lock it: this would take it from its next owner.
            kept = [queue for queue, process_queue in self.process_queues.items() if not process_queue.is_released]
            for queue in await self._context.locks.lock(kept):
                if await self.assigned.drop(queue):
                    _log.warning("group %s lost the lock of %s and starts again", self._context.group, queue)
                    self.rebalance_soon()

    # -- internals

    async def _refresh_routes(self) -> None:
        for topic in list(self.subscriptions):
            self._runtime.routes.watch(topic, self._context.group)
        is_any_missing = False
        for topic in list(self.subscriptions):
            is_any_missing |= not await self._runtime.routes.refresh(topic)
        # A runtime that already runs may refresh its routes much later, and has no routes of the missing topics.
        if is_any_missing:
            self._runtime.refresh_routes_soon()
        await self.subscriptions.check()

    def _announce_change(self) -> None:
        if not self.is_manual:
            self._runtime.heartbeat_soon()
        self.rebalance_soon()

    def _queue_info(self, process_queue: ProcessQueue) -> ProcessQueueInfo:
        (lowest, highest), locks = process_queue.bounds, self._context.locks
        return ProcessQueueInfo(
            commit_offset=self._context.offsets.known(process_queue.queue) or 0,
            cached_msg_min_offset=lowest,
            cached_msg_max_offset=highest,
            cached_msg_count=len(process_queue),
            cached_msg_size_in_mib=process_queue.body_bytes // _MIB,
            locked=locks is not None and locks.is_held(process_queue.queue),
            last_lock_timestamp=0 if locks is None else locks.granted_at_ms(process_queue.queue),
            droped=process_queue.is_dropped,
            last_pull_timestamp=process_queue.pulled_ms,
            last_consume_timestamp=process_queue.consumed_ms,
        )

    async def _rebalanced(self) -> float:
        try:
            return await self._share_out()
        finally:
            self._is_shared_out.set()

    async def _share_out(self) -> float:
        self._refused = set()
        await self.assigned.give_up_ended()
        is_complete = True
        if self._manual is None:
            is_complete = await self._rebalance.share_out(sorted(self.subscriptions))
        elif self._manual != self.held_queues():
            held = self.held_queues()
            await self.change_queues(sorted(self._manual - held), sorted(held - self._manual), is_shared=False)
        self._unlocked = self._refused
        self._call_listeners()
        if self._unlocked or any(one.is_dropped for one in self.process_queues.values()):
            return _LOCK_PAUSE_MS
        return self._context.settings.rebalance_interval_ms if is_complete else _INCOMPLETE_PAUSE_MS

    def _call_listeners(self) -> None:
        for topic, (listener, published) in list(self._listeners.items()):
            queues = set(self._runtime.routes.subscribe_queues(topic))
            held = {queue for queue in self.process_queues if queue.topic == topic}
            if published != (queues, held):
                # Store the queues before the call, so that a listener that fails is not called again for the same
                # change.
                self._listeners[topic] = (listener, (queues, held))
                try:
                    listener(set(queues), set(held))
                except Exception as error:  # noqa: BLE001 - the outer edge of a program's listener
                    _log.warning(
                        "queue listener of topic %s, group %s failed", topic, self._context.group, exc_info=error
                    )

    async def _save_offsets(self) -> None:
        while True:
            await asyncio.sleep(self._context.settings.persist_interval_ms / 1000.0)
            await self._context.offsets.send_changed()


class Consumer(Client):
    """Base class of push, pull and pop consumers. A consumer is a member of a group and receives messages."""

    _reserved_group = "DEFAULT_CONSUMER"
    _coordinator: GroupCoordinator
    _streams: list[MessageStream]

    def unsubscribe(self, topic: str) -> None:
        """Stop consuming a topic. The consumer gives up its queues immediately."""
        self._coordinator.unsubscribe(topic)

    def on_queues_changed(self, topic: str, listener: QueueListener) -> None:
        """Call ``listener(queues, held)`` on the event loop when the queues of a topic change, or when this consumer
        gets or loses queues of the topic. ``held`` are the queues of this consumer."""
        self._coordinator.listen(topic, listener)

    def held_queues(self) -> set[MessageQueue]:
        """Return the queues that this consumer owns now."""
        return self._coordinator.held_queues()

    def pause(self, *queues: MessageQueue) -> None:
        """Stop pulling from these queues. Without arguments, stop pulling from all present and future queues.

        Messages that are already pulled are still delivered.
        """
        self._coordinator.assigned.pause(queues, is_paused=True)

    def resume(self, *queues: MessageQueue) -> None:
        """Continue pulling from these queues. Without arguments, continue with all queues."""
        self._coordinator.assigned.pause(queues, is_paused=False)

    def status(self) -> MemberStatus:
        """Return the state of every queue, with the reason if a queue does not advance. ``print`` the result to get a
        table.
        """
        return self._coordinator.status(self._state.value)

    def _make_trace(self, tracing: Tracing) -> BackgroundHook:
        from rmqkit.client.producer.trace import MessageTrace  # few programs need it, and its import takes time

        return MessageTrace(self._runtime, self.group, "CONSUME", tracing)

    def _stream_of(self, source: StreamSource) -> MessageStream:
        stream = MessageStream(source, lambda message: self._hooks.polled(self.group, [message]))
        self._streams.append(stream)
        return stream

    def _abandon(self) -> None:
        """Leave the last messages of all streams unconsumed, so that they are delivered again."""
        for stream in self._streams:
            stream.abandon()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._abandon()
        await self.close()

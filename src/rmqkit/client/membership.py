"""One client's part in a group: what it subscribes to, the queues it holds, a pull loop for each.

::

    routes, members change ──> rebalance ──> one PullLoop per queue ──> ProcessQueue ──> Sink

====================  ==========================================================================================
a queue is            then
====================  ==========================================================================================
taken                 in ordered consumption once the broker has locked it; what its former owner had saved is read
given up              nothing new starts, handlers may finish for a moment, the offset is saved, the lock given back;
                      an ordered queue stays until its handler has ended, since its next owner must not overtake it
lost                  somebody else has the lock: it begins anew with the next rebalance
====================  ==========================================================================================

Who consumes is the consumer's matter (`Sink`), and what the queues of a topic are, and who gets which, `Rebalance`'s.
Loop only. Source: behaviour.md §8.3, §8.4, §8.6, §8.12, §8.15.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Collection, Iterable

from msgspec.structs import replace

from rmqkit.client.allocate import Allocate
from rmqkit.client.local_offsets import LocalOffsets
from rmqkit.client.locks import QueueLocks
from rmqkit.client.offsets import GroupOffsets, Offsets
from rmqkit.client.process_queue import ProcessQueue
from rmqkit.client.pulling import PullLoop, Sink
from rmqkit.client.rebalance import Rebalance
from rmqkit.client.runtime import ClientRuntime
from rmqkit.client.settings import ConsumerSettings
from rmqkit.client.tasks import Tasks, keep_doing
from rmqkit.errors import ClientError, SettingsError
from rmqkit.filter.subscription import is_tag_type, subscription
from rmqkit.protocol.bodies.clients import ConsumerData, MessageQueue, SubscriptionData
from rmqkit.protocol.bodies.consumers import ConsumeMessageDirectlyResult, ConsumerRunningInfo, ProcessQueueInfo
from rmqkit.protocol.codes import CURRENT_VERSION, version_name
from rmqkit.protocol.message import ReceivedMessage
from rmqkit.protocol.names import topic_fault
from rmqkit.settings import to_properties

__all__ = ["Membership", "offsets_of"]

_INCOMPLETE_PAUSE_MS = 1000.0
_LOCK_PAUSE_MS = 500.0
_HAND_OVER_MS = 300.0
"""How long running handlers may hold up giving a queue away; its next owner waits 500 ms."""

_RESET_WAIT_MS = 10_000.0
_NO_SPAN = 1 << 63
_MIB = 1 << 20

_log = logging.getLogger(__name__)


def offsets_of(runtime: ClientRuntime, group: str, settings: ConsumerSettings) -> Offsets:
    """Where a group's offsets are kept: at the brokers, or for broadcasting in a file."""
    if settings.is_broadcasting:
        return LocalOffsets(settings.offsets_dir, runtime.client_id, group)
    return GroupOffsets(runtime, group)


class Membership:
    """A member of a group; ``locks`` in ordered consumption, ``allocate`` None when every member has every queue."""

    def __init__(
        self,
        runtime: ClientRuntime,
        group: str,
        settings: ConsumerSettings,
        *,
        offsets: Offsets,
        sink: Sink,
        allocate: Allocate,
        consume_type: str,
        locks: QueueLocks | None = None,
        is_ordered: bool = False,
    ) -> None:
        self.process_queues: dict[MessageQueue, ProcessQueue] = {}
        self.subscriptions: dict[str, SubscriptionData] = {}
        self._runtime = runtime
        self._group = group
        self._settings = settings
        self._offsets = offsets
        self._sink = sink
        self._consume_type = consume_type
        self._locks = locks
        self._span_max = _NO_SPAN if is_ordered else settings.span_max
        self._rebalance = Rebalance(runtime, group, None if settings.is_broadcasting else allocate, self)
        self._assigned: set[MessageQueue] | None = None
        self._starts: dict[MessageQueue, int] = {}
        self._paused: set[MessageQueue] = set()
        self._is_all_paused = False
        self._is_unlocked = False
        self._pulls: dict[MessageQueue, asyncio.Task[None]] = {}
        self._tasks = Tasks()
        self._wake = asyncio.Event()
        self._is_open = False
        self._is_ordered = is_ordered
        self._opened_ms = 0

    # -- what it is to read

    def subscribe(self, topic: str, expression: str, expression_type: str) -> None:
        """Subscribe to a topic, or replace its subscription. Raises SettingsError: one of them is not legal."""
        fault = topic_fault(topic)
        if fault is not None:
            raise SettingsError(fault)
        version = self._runtime.clock.now_ms()
        try:
            data = subscription(topic, expression, expression_type=expression_type, version=version)
        except ValueError as error:
            raise SettingsError(f"subscription to topic {topic}: {error}") from None
        self.subscriptions[topic] = data
        if self._is_open:
            self._runtime.routes.watch(topic)
            self._runtime.refresh_routes_soon()
            self._changed()

    def unsubscribe(self, topic: str) -> None:
        """Give up a topic; its queues go with the next rebalance, at once."""
        if self.subscriptions.pop(topic, None) is not None and self._is_open:
            self._runtime.routes.unwatch(topic)
            self._changed()

    def assign(self, queues: Collection[MessageQueue], expression: str, expression_type: str) -> None:
        """Read these queues, whoever else does; instead of subscribing. Raises SettingsError: as `subscribe`."""
        self._assigned = set(queues)
        for topic in {queue.topic for queue in queues}:
            self.subscribe(topic, expression, expression_type)
        self.rebalance_soon()

    @property
    def is_manual(self) -> bool:
        """Whether queues were assigned."""
        return self._assigned is not None

    def pause(self, queues: Collection[MessageQueue]) -> None:
        """Take in nothing more of some queues, or of all there are and will be."""
        self._is_all_paused = self._is_all_paused or not queues
        self._paused.update(queues)
        self._mark_paused()

    def resume(self, queues: Collection[MessageQueue]) -> None:
        """The opposite of `pause`."""
        self._paused = self._paused.difference(queues) if queues else set()
        self._is_all_paused = self._is_all_paused and bool(queues)
        self._mark_paused()

    async def start_at(self, queue: MessageQueue, offset: int) -> None:
        """Begin a queue anew at an offset; what was pulled of it is dropped.
        Raises ClientError: the queue is not held."""
        if queue not in self.process_queues and queue not in (self._assigned or ()):
            raise ClientError(
                f"{queue} is not held by this member of group {self._group}: wait until it is, or assign it"
            )
        self._starts[queue] = offset
        if queue in self.process_queues:
            await self._drop(queue)
            self._take(queue, 0.0)

    # -- from start to end

    async def open(self) -> None:
        """Say hello to the brokers and begin to share queues.
        Raises NoRoute: no name server answered.
        Raises PeerRefused: a broker cannot filter by an expression."""
        self._is_open = True
        self._opened_ms = self._runtime.clock.now_ms()
        for topic in list(self.subscriptions):
            self._runtime.routes.watch(topic)
            await self._runtime.routes.refresh(topic)
        await self._check_expressions()
        await self._runtime.heartbeat()
        name = f"rebalance of group {self._group}"
        self._tasks.start(keep_doing(self._share_out, wake=self._wake, name=name), name)
        self._tasks.start(self._save_offsets(), f"offsets of group {self._group}")

    async def stop(self) -> None:
        """Pull nothing more and start no handler."""
        self._is_open = False
        await self._tasks.close()
        for process_queue in self.process_queues.values():
            process_queue.drop()

    async def leave(self, still_handled: Collection[MessageQueue] = ()) -> None:
        """Save offsets, give back locks except of queues that a handler is busy with, leave the group."""
        await self._offsets.save_all()
        if self._locks is not None:
            await self._locks.unlock(self.process_queues.keys() - set(still_handled))
        for topic in self.subscriptions:
            self._runtime.routes.unwatch(topic)
        if not self.is_manual:
            await self._runtime.unregister_consumer(self._group)

    # -- what the runtime and the rebalance call

    def consumer_data(self) -> ConsumerData:
        """The group and its subscriptions, as heartbeats say them."""
        return ConsumerData(
            group_name=self._group,
            consume_type=self._consume_type,
            message_model=self._settings.message_model.value,
            consume_from_where=self._settings.start_from.value,
            subscription_data_set=list(self.subscriptions.values()),
        )

    def rebalance_soon(self) -> None:
        """Look at who owns which queue with the next turn of the loop."""
        self._wake.set()

    def held_queues(self) -> set[MessageQueue]:
        """The queues this member has."""
        return set(self.process_queues)

    async def change_queues(self, taken: list[MessageQueue], given_up: list[MessageQueue], *, is_shared: bool) -> None:
        """Give up queues, tell the brokers about the newest subscriptions, then begin to pull the new queues."""
        await asyncio.gather(*(self._give_up(queue) for queue in given_up))
        self._renew_versions({queue.topic for queue in (*taken, *given_up)})
        if not self.is_manual:
            await self._runtime.heartbeat()
        if self._locks is not None and taken:
            await self._locks.lock(taken)
            taken, wanted = [queue for queue in taken if self._locks.is_held(queue)], taken
            self._is_unlocked = self._is_unlocked or len(taken) < len(wanted)
        pause_ms = float(self._settings.take_over_pause_ms) if is_shared else 0.0
        for queue in taken:
            self._take(queue, pause_ms)
        self._share_limits()

    async def reset_offsets(self, offsets: dict[MessageQueue, int]) -> None:
        """Go on elsewhere, as an operator wishes: handlers may finish, then queues begin anew at these offsets."""
        held = [(queue, offset) for queue, offset in offsets.items() if queue in self.process_queues]
        await asyncio.gather(*(self._reset(queue, offset) for queue, offset in held))
        self.rebalance_soon()

    def offsets_of(self, topic: str) -> dict[MessageQueue, int]:
        """Where the group is in the queues of a topic that are held here."""
        known = {queue: self._offsets.known(queue) for queue in self.process_queues if queue.topic == topic}
        return {queue: offset for queue, offset in known.items() if offset is not None}

    def running_info(self) -> ConsumerRunningInfo:
        """Settings, subscriptions and what is held of each queue."""
        own = {
            "PROP_CONSUME_TYPE": self._consume_type,
            "PROP_CONSUMEORDERLY": str(self._is_ordered).lower(),
            "PROP_THREADPOOL_CORE_SIZE": str(getattr(self._settings, "handlers_max", 0)),
            "PROP_CONSUMER_START_TIMESTAMP": str(self._opened_ms),
            "PROP_CLIENT_VERSION": version_name(CURRENT_VERSION),
        }
        secrets = {"accessKey", "secretKey", "securityToken"}
        settings = {key: text for key, text in to_properties(self._settings).items() if key not in secrets}
        return ConsumerRunningInfo(
            properties=settings | own,
            subscription_set=list(self.subscriptions.values()),
            mq_table={queue: self._queue_info(one) for queue, one in self.process_queues.items()},
        )

    async def consume_directly(self, message: ReceivedMessage) -> ConsumeMessageDirectlyResult:
        """Consume a message that an operator chose. Raises ClientError: there is no handler."""
        return await self._sink.consume_directly(message)

    async def renew_locks(self) -> None:
        """Renew the locks of all queues; one that somebody else holds begins anew."""
        if self._locks is not None:
            for queue in await self._locks.lock(self.process_queues):
                if queue in self.process_queues:
                    _log.warning("group %s lost the lock of %s: it begins anew", self._group, queue)
                    await self._drop(queue)
                    self.rebalance_soon()

    # -- inside

    def _changed(self) -> None:
        if not self.is_manual:
            self._runtime.heartbeat_soon()
        self.rebalance_soon()

    async def _check_expressions(self) -> None:
        """Have a broker say whether it can filter by the expressions that are not tags."""
        for topic, data in self.subscriptions.items():
            brokers = self._runtime.routes.brokers_of(topic)
            if not is_tag_type(data.expression_type) and brokers:
                address = self._runtime.routes.any_address(brokers[0])
                assert address is not None, "a broker of a route has an address"
                await self._runtime.calls.check_subscription(address[1], self._runtime.client_id, self._group, data)

    def _queue_info(self, process_queue: ProcessQueue) -> ProcessQueueInfo:
        lowest, highest = process_queue.bounds
        return ProcessQueueInfo(
            commit_offset=self._offsets.known(process_queue.queue) or 0,
            cached_msg_min_offset=lowest,
            cached_msg_max_offset=highest,
            cached_msg_count=len(process_queue),
            cached_msg_size_in_mib=process_queue.body_bytes // _MIB,
            locked=self._locks is not None and self._locks.is_held(process_queue.queue),
            droped=process_queue.is_dropped,
            last_pull_timestamp=process_queue.pulled_ms,
            last_consume_timestamp=process_queue.consumed_ms,
        )

    async def _share_out(self) -> float:
        self._is_unlocked = False
        for queue in [queue for queue, pull in self._pulls.items() if pull.done()]:
            await self._give_up(queue)  # its loop ended by an error, or its handler is not done: the queue begins anew
        is_complete = True
        if self._assigned is None:
            is_complete = await self._rebalance.share_out(sorted(self.subscriptions))
        elif self._assigned != self.held_queues():
            held = self.held_queues()
            await self.change_queues(sorted(self._assigned - held), sorted(held - self._assigned), is_shared=False)
        if self._is_unlocked or any(one.is_dropped for one in self.process_queues.values()):
            return _LOCK_PAUSE_MS
        return self._settings.rebalance_interval_ms if is_complete else _INCOMPLETE_PAUSE_MS

    def _take(self, queue: MessageQueue, pause_ms: float) -> None:
        settings = self._settings
        process_queue = ProcessQueue(
            queue,
            messages_max=settings.held_messages_max,
            bytes_max=settings.held_mib_max * _MIB,
            span_max=self._span_max,
        )
        loop = PullLoop(
            self._runtime,
            self._group,
            process_queue,
            subscription_of=self.subscriptions.get,
            offsets=self._offsets,
            sink=self._sink,
            settings=settings,
            on_illegal=self._offset_illegal,
            start_offset=self._starts.pop(queue, None),
            is_member=not self.is_manual,
        )
        self.process_queues[queue] = process_queue
        self._pulls[queue] = self._tasks.start(loop.run(pause_ms), f"pull {queue} for group {self._group}")
        self._mark_paused()

    async def _give_up(self, queue: MessageQueue) -> None:
        """Stop pulling, let handlers finish for a moment, save the offset so that the next owner starts there."""
        process_queue = await self._stop_pulling(queue)
        if process_queue is None:
            return  # its offset was illegal, just now
        is_idle = await process_queue.wait_for_handlers(_HAND_OVER_MS)
        if is_idle or self._locks is None:
            await self._let_go(process_queue)

    async def _stop_pulling(self, queue: MessageQueue) -> ProcessQueue | None:
        process_queue = self.process_queues.get(queue)
        if process_queue is not None:
            process_queue.drop()
            pull = self._pulls[queue]
            pull.cancel()
            await asyncio.wait([pull])
        return process_queue

    async def _reset(self, queue: MessageQueue, offset: int) -> None:
        process_queue = await self._stop_pulling(queue)
        if process_queue is not None:
            await process_queue.wait_for_handlers(_RESET_WAIT_MS)
            process_queue.release()
            self._offsets.set_to(queue, offset)
            await self._let_go(process_queue)

    async def _drop(self, queue: MessageQueue) -> None:
        """Stop at once and save nothing."""
        if (process_queue := self.process_queues.get(queue)) is not None:
            process_queue.release()
            await self._stop_pulling(queue)
            self._forget(queue)

    async def _offset_illegal(self, process_queue: ProcessQueue, offset: int) -> None:
        process_queue.drop()
        if self._locks is not None:
            await process_queue.wait_for_handlers(_RESET_WAIT_MS)
        self._offsets.freeze(process_queue.queue, offset)
        await self._let_go(process_queue)
        self.rebalance_soon()

    async def _let_go(self, process_queue: ProcessQueue) -> None:
        process_queue.release()
        await self._offsets.save(process_queue.queue)
        if self._locks is not None:
            await self._locks.unlock([process_queue.queue])
        self._forget(process_queue.queue)

    def _forget(self, queue: MessageQueue) -> None:
        self._offsets.forget(queue)
        self.process_queues.pop(queue, None)
        self._pulls.pop(queue, None)

    def _mark_paused(self) -> None:
        for queue, process_queue in self.process_queues.items():
            process_queue.is_paused = self._is_all_paused or queue in self._paused

    def _share_limits(self) -> None:
        """Share the limits of a topic among its queues."""
        settings, queues = self._settings, Counter(queue.topic for queue in self.process_queues)
        for queue, process_queue in self.process_queues.items():
            if settings.topic_messages_max > 0:
                process_queue.messages_max = max(1, settings.topic_messages_max // queues[queue.topic])
            if settings.topic_mib_max > 0:
                process_queue.bytes_max = max(1, settings.topic_mib_max // queues[queue.topic]) * _MIB

    def _renew_versions(self, topics: Iterable[str]) -> None:
        now_ms = self._runtime.clock.now_ms()
        for topic in self.subscriptions.keys() & topics:
            data = self.subscriptions[topic]
            self.subscriptions[topic] = replace(data, sub_version=max(now_ms, data.sub_version + 1))

    async def _save_offsets(self) -> None:
        while True:
            await asyncio.sleep(self._settings.persist_interval_ms / 1000.0)
            await self._offsets.send_changed()

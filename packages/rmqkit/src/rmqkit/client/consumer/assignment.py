"""Assignment of queues to a member of a group (``RebalanceImpl``): a member computes its queues, starts to pull new
queues, and gives up others.

For each topic, the allocation strategy gets the queues of the route and the client ids of the group from one broker,
both sorted. Every client computes the same result. The client gives up the queues that are not in its share and takes
new queues. If a broker does not answer, the client keeps its queues of the topic until the next rebalance.

====================  ==========================================================================================
a queue is            effect
====================  ==========================================================================================
taken                 the offset that the former owner saved is read, and messages are pulled
given up              no new handler starts, running handlers may finish for a moment, the offset is saved, the lock is
                      released; an ordered queue is released after its handler has returned, so that the next owner
                      does not overtake the handler
lost                  another member has the lock: the queue restarts with the next rebalance
moved                 an operator or the program sets another offset: the queue restarts at this offset
====================  ==========================================================================================

Each of these steps waits for a broker or a handler, so each queue performs only one step at a time (``_turns``). Two
concurrent steps could leave a pull loop without an owner, and this loop would never end.
Use this module only on the event loop. Source: behaviour.md §5.3, §8.4, §8.6, §8.12.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Protocol

from rmqkit.client.consumer.context import ConsumerContext, Subscriptions
from rmqkit.client.consumer.loop import PullLoop, PullSchedule, ScheduledPull
from rmqkit.client.consumer.process_queue import ProcessQueue
from rmqkit.client.observe.status import ConsumerStats
from rmqkit.errors import PeerRefused, RmqError
from rmqkit.protocol.codes import ResponseCode
from rmqkit.protocol.schemas.clients import MessageQueue
from rmqkit.remoting.tasks import Tasks

_log = logging.getLogger(__name__)
_HAND_OVER_MS = 300.0
"""The longest time that giving up a queue waits for running handlers. The next owner waits 500 ms."""

_RESET_WAIT_MS = 10_000.0
_NO_SPAN = 1 << 63
_MIB = 1 << 20


class QueueOwner(Protocol):
    """An interface that applies the result of a rebalance: the part of `GroupCoordinator` that `Rebalance` needs."""

    def subscribe(self, topic: str, expression: str, expression_type: str) -> None: ...

    def unsubscribe(self, topic: str) -> None: ...

    def held_queues(self) -> set[MessageQueue]: ...

    async def change_queues(
        self, taken: list[MessageQueue], given_up: list[MessageQueue], *, is_shared: bool
    ) -> None: ...


class Rebalance:
    """The algorithm that chooses the queues of this member (in broadcasting: all queues). The `QueueOwner` applies the
    result.
    """

    def __init__(self, context: ConsumerContext, owner: QueueOwner) -> None:
        self._runtime = context.runtime
        self._group = context.group
        self._allocate = None if context.settings.is_broadcasting else context.allocate
        self._owner = owner

    async def share_out(self, topics: Iterable[str]) -> bool:
        """Rebalance all subscribed topics once. Return True if the queues of every topic could be assigned."""
        wanted: set[MessageQueue] = set()
        is_complete, is_shared = True, False
        held = self._owner.held_queues()
        for topic in topics:
            kept = {queue for queue in held if queue.topic == topic}
            try:
                queues, members = await self._queues_of(topic, kept)
            except RmqError as error:
                _log.info("keeping the queues of topic %s for group %s: %s", topic, self._group, error)
                # Keep our queues. If we gave them up because one broker did not answer, their consumption would stop.
                wanted |= kept
                is_complete = False
            else:
                wanted |= queues
                is_shared = is_shared or members > 1
                is_complete = is_complete and members > 0
        taken, given_up = sorted(wanted - held), sorted(held - wanted)
        if taken or given_up:
            await self._owner.change_queues(taken, given_up, is_shared=is_shared)
        return is_complete

    async def _queues_of(self, topic: str, held: set[MessageQueue]) -> tuple[set[MessageQueue], int]:
        """Return this member's queues of a topic, and the number of clients in the group.

        An empty list of queues or members is no reason to give up the ``held`` queues of the topic: a restarted name
        server or broker does not know them yet. Clients of 5.5 have the same rule.
        """
        queues = self._runtime.routes.subscribe_queues(topic)
        if not queues:
            return held, 1
        if self._allocate is None:
            return set(queues), 1
        client_ids = await self._client_ids(topic)
        own_id = self._runtime.client_id
        if own_id not in client_ids:  # the broker does not know this client
            await self._runtime.heartbeat()
            client_ids = await self._client_ids(topic)
        if not client_ids:
            return held, 0
        if own_id not in client_ids:
            # An assignment computed without this client would leave queues without a client. Take no queues, and retry
            # in a second.
            return set(), 0
        return set(self._allocate(queues, client_ids, own_id)), len(client_ids)

    async def _client_ids(self, topic: str) -> list[str]:
        """Return the client ids of the group from one of the topic's brokers. The list is empty if the broker does not
        know the group."""
        address = self._some_broker(topic)
        try:
            return sorted(set(await self._runtime.calls.consumer_ids(address, self._group)))
        except PeerRefused as error:
            if error.code == ResponseCode.SYSTEM_ERROR:
                return []
            raise

    def _some_broker(self, topic: str) -> str:
        routes = self._runtime.routes
        found = routes.any_address(random.choice(routes.brokers_of(topic)))
        assert found is not None, "a broker of a route has an address"
        return found[1]


class Pauses:
    """The queues that a program paused: some queues, or all present and future queues except some."""

    def __init__(self) -> None:
        self._are_all_paused = False
        self._excepted: set[MessageQueue] = set()

    def __contains__(self, queue: object) -> bool:
        # This is an exclusive or: an exception to "all paused" runs, and an exception to "none paused" is paused.
        return self._are_all_paused is not (queue in self._excepted)

    def set(self, queues: Collection[MessageQueue], *, is_paused: bool) -> None:
        """Pause or resume some queues, or all queues if ``queues`` is empty."""
        if not queues:
            self._are_all_paused = is_paused
            self._excepted.clear()
        elif self._are_all_paused is is_paused:
            self._excepted.difference_update(queues)
        else:
            self._excepted.update(queues)


@dataclass(eq=False)
class AssignedQueues:
    """The queues of this member. Each queue has a process queue and a loop that fills it.

    ``process_queues`` are the owned queues, and ``schedules`` are the topics that the program pulls itself. If a queue
    is given up although it is still assigned to this member, ``rebalance_soon`` is called, and the next rebalance takes
    the queue again."""

    context: ConsumerContext
    subscriptions: Subscriptions
    rebalance_soon: Callable[[], None]

    def __post_init__(self) -> None:
        self.process_queues: dict[MessageQueue, ProcessQueue] = {}
        self.schedules: dict[str, PullSchedule] = {}
        self.stats: dict[str, ConsumerStats] = {}
        self._starts: dict[MessageQueue, int] = {}
        self._pauses = Pauses()
        self._pulls: dict[MessageQueue, asyncio.Task[None]] = {}
        self._turns: defaultdict[MessageQueue, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._tasks = Tasks()
        self._is_stopped = False

    def take(self, queues: Iterable[MessageQueue], *, pause_ms: float, is_member: bool) -> None:
        """Wait for ``pause_ms``, then start to pull the queues. If ``is_member`` is False, each pull request includes
        its own subscription."""
        self.context.consume_service.drop_stale()
        if self._is_stopped:
            return  # the program moved a queue while its consumer was closed
        for queue in queues:
            # If two loops ran for a queue, nothing would refer to the first loop, and it would never stop.
            assert queue not in self.process_queues, f"{queue} is held already"
            process_queue = self.process_queues[queue] = self._new_process_queue(queue)
            loop = self._loop(process_queue, is_member=is_member)
            self._pulls[queue] = self._tasks.start(loop.run(pause_ms), f"pull {queue} for group {self.context.group}")
        self._share_limits()

    async def begun(self) -> None:
        """Wait until the start offset of each pulled queue is known, or until the first attempt to find it has
        failed.
        """
        await asyncio.gather(*(one.is_begun.wait() for one in list(self.process_queues.values()) if not one.is_popped))

    async def give_up(self, queue: MessageQueue) -> None:
        """Stop pulling a queue, wait a moment for running handlers, and save the offset at which the next owner
        starts."""
        async with self._turns[queue]:
            process_queue = await self._stop_pulling(queue)
            if process_queue is None:
                return  # its offset was illegal, or it was moved meanwhile
            # Wait for handlers before the offset is saved: messages that they finish meanwhile are not delivered again.
            is_idle = await process_queue.wait_for_handlers(_HAND_OVER_MS)
            # If an ordered queue has a running handler, it remains dropped and locked. The next rebalance calls
            # `give_up_ended`.
            if is_idle or self.context.locks is None:
                await self._hand_over(process_queue)

    async def give_up_ended(self) -> None:
        """Give up the queues with a pull loop that has ended, by an error or because an earlier `give_up` found a
        running handler. The next rebalance restarts the queues."""
        for queue in [queue for queue, pull in self._pulls.items() if pull.done() and not self._turns[queue].locked()]:
            await self.give_up(queue)

    async def drop(self, queue: MessageQueue) -> bool:
        """Stop a queue immediately and save nothing. Return True if this member owned the queue."""
        if queue in self.process_queues:
            # Release it before waiting for the lock: a handler that returns during the wait must not commit an offset.
            self.process_queues[queue].release()
        async with self._turns[queue]:
            process_queue = await self._stop_pulling(queue)
            if process_queue is not None:
                process_queue.release()
                self._remove(queue)
            return process_queue is not None

    async def reset(self, queue: MessageQueue, offset: int) -> None:
        """Wait until handlers have finished, set the group's offset, and give the queue up. The queue restarts at this
        offset.
        """
        async with self._turns[queue]:
            process_queue = await self._stop_pulling(queue)
            if process_queue is not None:
                await process_queue.wait_for_handlers(_RESET_WAIT_MS)
                process_queue.release()
                self.context.offsets.set_to(queue, offset)
                await self._hand_over(process_queue)

    async def start_at(self, queue: MessageQueue, offset: int, *, is_member: bool) -> bool:
        """Restart a queue at an offset, and drop its pulled messages. If the program assigned the queue itself (not
        ``is_member``), a later start of the queue uses the offset, too. Return False if this member of the group does
        not own the queue, or has just given it up."""
        is_held = await self.drop(queue)
        if is_held or not is_member:
            self._starts[queue] = offset
        if is_held:
            self.take([queue], pause_ms=0.0, is_member=is_member)
        return is_held or not is_member

    def pause(self, queues: Collection[MessageQueue], *, is_paused: bool) -> None:
        """Pause or resume some queues, or all present and future queues."""
        self._pauses.set(queues, is_paused=is_paused)
        for queue, process_queue in self.process_queues.items():
            process_queue.is_paused = queue in self._pauses

    async def stop(self) -> None:
        self._is_stopped = True
        await self._tasks.close()
        for process_queue in self.process_queues.values():
            process_queue.drop()

    # -- internals

    def _new_process_queue(self, queue: MessageQueue) -> ProcessQueue:
        stats = self.stats.setdefault(queue.topic, ConsumerStats(self.context.runtime.clock.monotonic_ms()))
        process_queue = self._make_process_queue(queue, self.context.settings.limits.held_mib_max * _MIB, stats)
        process_queue.is_paused = queue in self._pauses
        return process_queue

    def _make_process_queue(self, queue: MessageQueue, bytes_max: int, stats: ConsumerStats) -> ProcessQueue:
        return ProcessQueue(
            queue,
            messages_max=self.context.settings.limits.held_messages_max,
            window=self.context.settings.window_at_start,
            bytes_max=bytes_max,
            span_max=_NO_SPAN if self.context.is_ordered else self.context.settings.limits.span_max,
            next_offset=self._starts.pop(queue, None),
            stats=stats,
        )

    def _loop(self, process_queue: ProcessQueue, *, is_member: bool) -> PullLoop | ScheduledPull:
        schedule = self.schedules.get(process_queue.queue.topic)
        if schedule is not None:
            return ScheduledPull(schedule, process_queue, self.context.settings.pull.error_pause_ms)
        return self._make_loop(process_queue, is_member=is_member)

    def _make_loop(self, process_queue: ProcessQueue, *, is_member: bool) -> PullLoop:
        return PullLoop(self.context, process_queue, self.subscriptions.get, self._offset_illegal, is_member=is_member)

    async def _stop_pulling(self, queue: MessageQueue) -> ProcessQueue | None:
        process_queue = self.process_queues.get(queue)
        if process_queue is not None:
            process_queue.drop()
            assert queue in self._pulls, f"{queue} is held without a loop"
            pull = self._pulls[queue]
            pull.cancel()
            # Do not use ``await pull``: its CancelledError would look like a cancellation of the current task.
            await asyncio.wait([pull])
        return process_queue

    async def _offset_illegal(self, process_queue: ProcessQueue, offset: int) -> None:
        process_queue.drop()
        async with self._turns[process_queue.queue]:
            if self.context.locks is not None:
                await process_queue.wait_for_handlers(_RESET_WAIT_MS)
                # Freeze the offset: running handlers would otherwise set it again to a value that is out of the
                # broker's range.
            self.context.offsets.freeze(process_queue.queue, offset)
            await self._hand_over(process_queue)
        self.rebalance_soon()

    async def _hand_over(self, process_queue: ProcessQueue) -> None:
        assert process_queue.is_dropped, "no handler can start in a queue that is handed over"
        # Keep this order. First, no offset can change any more. Then the offset is saved. Only then can another member
        # lock the queue.
        process_queue.release()
        await self.context.offsets.save(process_queue.queue)
        if self.context.locks is not None:
            await self.context.locks.unlock([process_queue.queue])
        self._remove(process_queue.queue)

    def _remove(self, queue: MessageQueue) -> None:
        self.context.offsets.remove_offset(queue)
        self.process_queues.pop(queue, None)
        self._pulls.pop(queue, None)

    def _share_limits(self) -> None:
        settings, queues = self.context.settings, Counter(queue.topic for queue in self.process_queues)
        for queue, process_queue in self.process_queues.items():
            if settings.limits.topic_messages_max > 0:
                process_queue.messages_max = max(1, settings.limits.topic_messages_max // queues[queue.topic])
            if settings.limits.topic_mib_max > 0:
                process_queue.bytes_max = max(1, settings.limits.topic_mib_max // queues[queue.topic]) * _MIB

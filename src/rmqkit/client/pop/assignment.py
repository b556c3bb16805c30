"""Which queues are popped and which pulled, as brokers share them out (``RebalancePushImpl`` without clientRebalance).

======================  ========================================  =========================================
the broker's answer     a push consumer                           a pop consumer
======================  ========================================  =========================================
queues to pop           pops them                                 pops them
queues to pull          pulls them, and what was popped before    pops all queues of every broker together
                        and comes again
code 3, no strategy     shares them out with the other members    pops all queues of every broker together
not asked (in order)                                              pops each queue by itself
======================  ========================================  =========================================

Queue -1 of a broker stands for all of its queues. One whose mode changed is given up and taken again in the next round.
A pop that a broker still holds then (up to 15 s) may bring what is pulled as well: the message is handled twice.
Source: behaviour.md §4.15, §8.4; remoting.md §4.6.1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rmqkit.client.consumer import allocate as strategies
from rmqkit.client.consumer.allocate import Allocate
from rmqkit.client.consumer.assignment import Rebalance
from rmqkit.client.consumer.context import Member
from rmqkit.client.pop.session import ANY_QUEUE
from rmqkit.errors import PeerRefused
from rmqkit.filter.subscription import TAG
from rmqkit.protocol.bodies.clients import MessageQueue
from rmqkit.protocol.bodies.pop import Assignment, QueryAssignmentBody
from rmqkit.protocol.codes import ResponseCode
from rmqkit.protocol.names import RETRY_PREFIX, pop_retry_topic, with_namespace

if TYPE_CHECKING:
    from rmqkit.client.consumer.group import Membership

__all__ = ["Assigned"]

_STRATEGIES: dict[Allocate, str] = {strategies.averagely: "AVG", strategies.averagely_by_circle: "AVG_BY_CIRCLE"}
_POP = "POP"


class Assigned(Rebalance):
    """Asks brokers for our queues, and tells ``pops`` which of them are popped."""

    def __init__(self, member: Member, owner: Membership) -> None:
        super().__init__(member, owner)
        assert member.pops is not None, "a member whose queues brokers share out pops"
        self._pops = member.pops
        self._only_pops = member.only_pops
        self._strategy = _STRATEGIES.get(member.allocate)
        self._retried: set[str] = set()

    async def _queues_of(self, topic: str) -> tuple[set[MessageQueue], int]:
        readable = self._runtime.routes.subscribe_queues(topic)
        if not readable:
            return set(), 1
        if self._only_pops and self._pops.is_ordered:
            return self._with_modes(topic, set(), set(readable))
        assigned = await self._ask(topic)
        popped = {one.message_queue for one in assigned or () if one.mode == _POP}
        if self._only_pops:
            everywhere = {MessageQueue(topic, queue.broker_name, ANY_QUEUE) for queue in readable}
            return self._with_modes(topic, set(), popped or everywhere)
        if assigned is None:
            queues, members = await super()._queues_of(topic)
            wanted, is_settled = self._with_modes(topic, queues, set())
            return wanted, members if is_settled else 0
        pulled = {one.message_queue for one in assigned} - popped
        retry = pop_retry_topic(self._group, with_namespace(self._runtime.namespace, topic))
        if pulled and not popped and topic not in self._retried and not topic.startswith(RETRY_PREFIX):
            self._retried.add(topic)
            self._owner.subscribe(retry, "*", TAG)
        elif popped and topic in self._retried:
            # Pops read that topic, too: first, in another round, save what was pulled of it.
            self._retried.discard(topic)
            self._owner.unsubscribe(retry)
            return {queue for queue in self._owner.held_queues() if queue.topic == topic}, 0
        return self._with_modes(topic, pulled, popped)

    async def _ask(self, topic: str) -> list[Assignment] | None:
        """Our queues; None when the broker does not share out."""
        if self._strategy is None:
            return None
        asked = QueryAssignmentBody(
            topic=topic, consumer_group=self._group, client_id=self._runtime.client_id, strategy_name=self._strategy
        )
        calls, address = self._runtime.calls, self._some_broker(topic)
        try:
            assigned = await calls.assignments(address, asked)
            if not assigned:  # there are none, or the broker has not seen us
                await self._runtime.heartbeat()
                assigned = await calls.assignments(address, asked)
        except PeerRefused as error:
            if error.code != ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
                raise
            return None
        return assigned

    def _with_modes(
        self, topic: str, pulled: set[MessageQueue], popped: set[MessageQueue]
    ) -> tuple[set[MessageQueue], int]:
        """The queues to hold without those that change their mode, and what that means: 0 that some do, 2 that others
        may have held them."""
        before = {queue for queue in self._pops.queues if queue.topic == topic}
        self._pops.queues.difference_update(before)
        self._pops.queues.update(popped)
        changed = (before & pulled) | ((popped & self._owner.held_queues()) - before)
        return (pulled | popped) - changed, 0 if changed else 2 if pulled else 1

"""A slave that acts for its missing master (slave-acting-master, ``enableSlaveActingMaster``).

If the master is missing, the living broker with the lowest id of its group acts for it. The acting master accepts no
messages. With ``enableRemoteEscape`` it sends due messages of its log to other brokers (`escape`). Without this setting
the messages wait for the master. The acting master serves offsets, locks and pulls like any slave from which clients
can read.

====================  ==========================================================================================
event                 action
====================  ==========================================================================================
the slave's id is     delivery of delayed and timed messages and check-back start, from the last copied positions
the lowest
a lower id returns    delivery and check-back stop after running deliveries. A returning master may request the stop,
                      to adopt the offsets (`PreOnline`). It has 30 s to register then
a master appears      the slave copies its tables and log, and answers held pulls: clients then go to the master
the master is gone    the slave no longer copies its tables
====================  ==========================================================================================

The slave requests the members from all name servers every second, and when a name server sends a notice. The slave acts
only if no name server knows a master and the replication link is down: a name server that has just started knows no
broker. The slave copies the master's delay offsets every 5 s, and the other tables every minute. Delayed messages that
the master delivered after the last copy are delivered twice.

While there is a master, a slave holds pulls that find no message. The reference answers PULL_RETRY_IMMEDIATELY. A
client with a route from before the master's return then pulls in a busy loop.

Before a broker registers, `PreOnline` adopts the progress of the other brokers of its name
(``BrokerPreOnlineService``). A returning master sends the address of its log to every living member of its group,
lowest id first (EXCHANGE_BROKER_HA_INFO). An acting master stops when it receives the address. Then the returning
master adopts the offsets of groups, also for half messages, and of delay levels, if they are greater than its own.
After this it registers. A returning slave of a group without a master does the same, but does not send an address.
The adoption never moves offsets backwards. Timed messages that an acting master delivered are skipped one by one, and
timed messages that it never had are delivered. If a member does not answer, the request is repeated every second while
name servers list the member, at most `_TRIES` times. Then the broker registers without the member's progress, which
repeats messages but loses none.
`PreOnline` runs only with ``enableSlaveActingMaster``, and not with ``skipPreOnline``.
Use this module only on the event loop. Source: behaviour.md §1.8, §10.5; remoting.md §4.4.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Protocol

from rmqkit.broker.delay.destination import RemotePut
from rmqkit.broker.delay.levels import Schedule
from rmqkit.broker.delay.timer import Timer
from rmqkit.broker.lite.service import LiteService
from rmqkit.broker.pull.long_polling import LongPolling
from rmqkit.broker.registration import Registration
from rmqkit.broker.settings import BrokerSettings
from rmqkit.broker.tables.groups import GroupTable
from rmqkit.broker.tables.offsets import OffsetTable
from rmqkit.broker.tables.topics import TopicTable
from rmqkit.broker.transaction.check_back import CheckBack
from rmqkit.broker.transaction.open import TransactionContext
from rmqkit.clock import Clock
from rmqkit.errors import RmqError
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import decode_header_leniently, request
from rmqkit.protocol.schemas.brokers import HaInfo, decode_timer_checkpoint
from rmqkit.remoting.client import RemotingClient
from rmqkit.remoting.tasks import Tasks, keep_doing, repeat
from rmqkit.rpc import BrokerCalls
from rmqkit.store.message_store import MessageStore


class ReplicationContext(TransactionContext, Protocol):
    """The parts of the broker that replication uses."""

    address: str
    clock: Clock
    groups: GroupTable
    lite: LiteService | None
    long_polling: LongPolling
    offsets: OffsetTable
    schedule: Schedule
    settings: BrokerSettings
    store: MessageStore
    timer: Timer | None
    topics: TopicTable


MASTER_ID = 0
# A function that accepts the addresses of the master and of its HA port. Both are None without a master.
OnMaster = Callable[[str | None, str | None], object]

_LOOK_MS = 1000.0
_COPY_MS = 5000.0
_TIMEOUT_MS = 3000
_GIVEN_WAY_MS = 30_000.0

_log = logging.getLogger(__name__)


class ActingMaster:
    """The part of a slave that watches the group and acts for a missing master.

    Args:
        remote_put: sends a due message to other brokers. None: due messages wait for the master.
        holds_back: returns True if the slave must not act: its link to a master is up, or its log has diverged.
        on_master: called with the addresses of a new master, or with None when the master is gone.
    """

    def __init__(
        self,
        context: ReplicationContext,
        registration: Registration,
        client: RemotingClient,
        *,
        remote_put: RemotePut | None,
        holds_back: Callable[[], bool],
        on_master: OnMaster,
    ) -> None:
        self._context = context
        self._registration = registration
        self._calls = BrokerCalls(client, _TIMEOUT_MS)
        self._remote_put = remote_put
        self._holds_back = holds_back
        self._on_master = on_master
        self._master: str | None = None
        self._given_way_until_ms = 0.0
        self._copied_ms = 0.0
        self._check_back: CheckBack | None = None
        self._checks_end = asyncio.Event()
        self._wake = asyncio.Event()
        self._watch = Tasks()
        self._services = Tasks()
        self._stopping = asyncio.Lock()
        self.is_acting = False

    def start(self) -> None:
        """Start to watch the members of the group."""
        self._watch.start(keep_doing(self._round, wake=self._wake, name="members of the group"), "members")

    async def close(self) -> None:
        await self._watch.close()
        await self._stop_acting()

    def look_soon(self) -> None:
        """Look up the members soon, because a name server reports that the lowest id changed."""
        self._wake.set()

    async def give_way(self) -> None:
        """Stop acting for a returning master. When this returns, the offsets no longer move."""
        # Set the time before the wait for the stop: a running look-up must not start acting again after the stop.
        self._given_way_until_ms = self._context.clock.monotonic_ms() + _GIVEN_WAY_MS
        await self._stop_acting()

    async def apply_members(self, members: Mapping[int, str]) -> None:
        """Start or stop acting, and follow a new master. ``members``: the current members by id. An empty table is
        ignored."""
        if not members:
            return  # no name server answered, or all name servers have just started: change nothing
        if members[min(members)] != self._context.address or self._holds_back():
            await self._stop_acting()
        # The returning master registers after its request to stop. Until then, name servers list this slave as the
        # lowest id. If the slave acted again in between, it would deliver messages that the master delivers, too.
        elif not (self.is_acting or self._has_given_way or self._stopping.locked()):
            self._start_acting()
        if members.get(MASTER_ID) != self._master:
            await self._master_changed(members.get(MASTER_ID))

    # -- inside

    @property
    def _has_given_way(self) -> bool:
        return self._context.clock.monotonic_ms() < self._given_way_until_ms

    async def _round(self) -> float:
        await self.apply_members(await self._registration.members())
        if self._remote_put is not None and self._master is not None:
            await self._copy_delays(self._master)
        return _LOOK_MS

    async def _copy_delays(self, master: str) -> None:
        now_ms = self._context.clock.monotonic_ms()
        if now_ms - self._copied_ms >= _COPY_MS:
            self._copied_ms = now_ms
            self._context.schedule.replace_with(await self._calls.delay_offsets(master))

    async def _master_changed(self, master: str | None) -> None:
        """Follow a new master, or report that the master is gone. Raises RemotingError: the new master does not answer
        yet. The next look-up tries again."""
        if master is None:
            _log.warning("the master %s is gone", self._master)
            self._on_master(None, None)
        else:
            ha_address = await self._ha_address_of(master)
            self._on_master(master, ha_address)
            # Answer held pulls: their clients wait here for messages that the master has, and then go to the master.
            self._context.long_polling.wake_all()
            _log.info("the master is %s, its log is at %s", master, ha_address)
        self._master = master  # set it last: after an error above, the next look-up tries again

    async def _ha_address_of(self, master: str) -> str | None:
        """Return the HA address of a master, or None if the answer does not have it. The registration returns it
        later."""
        answer = await self._calls.call(master, request(RequestCode.EXCHANGE_BROKER_HA_INFO))
        return decode_header_leniently(answer, HaInfo).master_ha_address

    def _start_acting(self) -> None:
        assert not self.is_acting, "a slave starts acting once"
        assert self._check_back is None, "the earlier check-back has stopped"
        context, self.is_acting = self._context, True
        # Set a new version: slaves and the returning master see by the version that the offsets changed.
        context.offsets.advance_version()
        if self._remote_put is None:
            _log.warning("acting as master: due messages wait for the master, because enableRemoteEscape is false")
            return
        _log.warning("acting as master: due messages are sent to other brokers")
        context.schedule.start(self._remote_put)
        if context.timer is not None:
            context.timer.start(self._remote_put)
        self._check_back, self._checks_end = CheckBack(context, self._remote_put), asyncio.Event()
        seconds = context.settings.transaction_check_interval_ms / 1000
        checking = repeat(
            self._check_back.round, name="half messages", seconds=seconds, end=self._checks_end, first_seconds=0
        )
        self._services.start(checking, "half messages")

    async def _stop_acting(self) -> None:
        """Stop acting, and wait for running deliveries. The call may be cancelled and repeated."""
        # A look-up and a returning master may call this concurrently: both must wait until all deliveries have ended.
        async with self._stopping:
            if self.is_acting:
                _log.warning("no longer acting as master")
            self.is_acting = False
            if self._check_back is not None:
                self._check_back.stop()
                self._checks_end.set()
                await self._context.schedule.stop_remote()
                if self._context.timer is not None:
                    await self._context.timer.stop_remote()
                self._check_back = None
            await self._services.finish()
            assert not self.is_acting, "acting does not start during a stop"


_TRIES = 12
_PAUSE_SECONDS = 1.0
_MEMBER_TIMEOUT_MS = 5000


class PreOnline:
    """The adoption of the progress of a broker's group. ``ha_address``: the address at which slaves read the broker's
    log."""

    def __init__(
        self, context: ReplicationContext, registration: Registration, client: RemotingClient, *, ha_address: str
    ) -> None:
        self._context = context
        self._registration = registration
        self._calls = BrokerCalls(client, _MEMBER_TIMEOUT_MS)
        self._ha_address = ha_address

    async def run(self) -> None:
        """Adopt the progress of all living members. When this returns, the broker can register."""
        others: list[str] = []
        for _ in range(_TRIES):
            members = await self._registration.members()
            own_id = self._context.settings.broker_id
            is_slave = own_id != MASTER_ID
            if is_slave and MASTER_ID in members:
                return  # the slave copies the master's tables soon
            others = [address for broker_id, address in sorted(members.items()) if broker_id != own_id]
            if all([await self._meet(address, is_slave=is_slave) for address in others]):
                return
            await asyncio.sleep(_PAUSE_SECONDS)
        _log.warning("registering without the progress of the others: %s", ", ".join(others))

    async def _meet(self, address: str, *, is_slave: bool) -> bool:
        """Adopt the offsets of a member. Return False if this has to be retried."""
        store = self._context.store
        own = HaInfo(self._ha_address, store.max_physical_offset, self._context.address)
        try:
            if not is_slave:
                await self._calls.ask(address, RequestCode.EXCHANGE_BROKER_HA_INFO, own)
            # Copy the offsets after the exchange. It returns when the acting master's offsets no longer move.
            delays = await self._calls.delay_offsets(address)
            offsets = await self._calls.consumer_offsets(address)
            await self._take_timer(address)
            self._context.schedule.merge_forward(delays)
            self._context.offsets.merge_forward(offsets)
        except RmqError as error:
            _log.warning("cannot take over the offsets of %s, trying again: %s", address, error)
            return False
        # Write now: after a crash before the next regular write, consumed messages would be delivered again.
        self._context.offsets.persist()
        return True

    async def _take_timer(self, address: str) -> None:
        if self._context.timer is not None:
            answer = await self._calls.call(address, request(RequestCode.GET_TIMER_CHECK_POINT))
            if answer.code == ResponseCode.SUCCESS:  # otherwise the member has no timer
                self._context.timer.merge_forward(decode_timer_checkpoint(answer.payload))

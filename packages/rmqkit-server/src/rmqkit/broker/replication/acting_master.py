"""A slave that goes on for its master while that is gone (slave-acting-master, ``enableSlaveActingMaster``).

Of the brokers of one name the living one with the lowest id acts for a master that is gone. It takes no messages: what
becomes due in its log is put at other brokers (`escape`), and only with ``enableRemoteEscape``. Without, everything due
waits for the master. Offsets, locks and pulls are served as by any slave that may be read from.

====================  ==========================================================================================
what is seen          then
====================  ==========================================================================================
lowest id is ours     delivery of delayed and timed messages and check-back begin, from where the master was when copied
somebody lower is     they end when what is on its way has arrived; a returning master may ask for that by itself,
there again           to take over the offsets (`PreOnline`), and has 30 s to register then
master came           its tables and log are followed; held pulls are answered, for their clients to go to it
master went           its tables are not copied any more
====================  ==========================================================================================

Who is there is asked of all name servers every second, and when one of them sends a notice. The group is believed
masterless when none of them knows a master and the replication link to it is down, too: a name server that has just
started knows nobody. What the master delivers of delayed messages is asked every 5 s rather than with the other tables
every minute: what it delivered since is what is delivered twice.

A slave whose master is there holds pulls that find nothing. The reference answers PULL_RETRY_IMMEDIATELY: a client
whose route is older than the master's return then asks it in circles.

Before a broker registers, `PreOnline` takes over what others of its name did in its absence
(``BrokerPreOnlineService``). A returning master sends every living member of its group, lowest id first, where its log
is to be followed (EXCHANGE_BROKER_HA_INFO): an acting master stops then. Then it takes over the offsets of groups, half
messages among them, and of delay levels, where they are further than its own; only after that it registers and goes on
from there. A returning slave of a masterless group does the same without a word about logs. Progress is never taken
back by this. Timed messages that an acting master delivered are left out, one by one: what it never had is delivered
all the same. A member that does not answer is asked again every second, as long as name servers list it, `_TRIES` times
at most: a broker that waits for a dead one would help nobody, and what it redoes then is delivered twice, not lost.
Only with ``enableSlaveActingMaster``, and not with ``skipPreOnline``. Loop only. Source: behaviour.md §1.8, §10.5;
remoting.md §4.4.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Protocol

from rmqkit.broker.delay.destination import RemotePut
from rmqkit.broker.delay.levels import Schedule
from rmqkit.broker.delay.timer import Timer
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
    """The parts of the broker that replication may touch."""

    address: str
    clock: Clock
    groups: GroupTable
    long_polling: LongPolling
    offsets: OffsetTable
    schedule: Schedule
    settings: BrokerSettings
    store: MessageStore
    timer: Timer | None
    topics: TopicTable


MASTER_ID = 0
# Takes where the master and its HA port are, or that there is none.
OnMaster = Callable[[str | None, str | None], object]

_LOOK_MS = 1000.0
_COPY_MS = 5000.0
_TIMEOUT_MS = 3000
_GIVEN_WAY_MS = 30_000.0

_log = logging.getLogger(__name__)


class ActingMaster:
    """Watches a slave's group and acts for a master that is gone.

    Args:
        remote_put: puts what is due at other brokers; None keeps it for the master.
        holds_back: whether it must not act all the same: its link to a master is up, or its log has parted from it.
        on_master: called with a master that came, or None when it went.
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
        """Look who is there from now on."""
        self._watch.start(keep_doing(self._round, wake=self._wake, name="members of the group"), "members")

    async def close(self) -> None:
        await self._watch.close()
        await self._stop_acting()

    def look_soon(self) -> None:
        """Look who is there soon: a name server says that the lowest id changed."""
        self._wake.set()

    async def give_way(self) -> None:
        """Stop acting for a master that is about to come back; when this returns its offsets do not move any more."""
        # Set before the wait for the stop: a look under way must not start acting again after the stop.
        self._given_way_until_ms = self._context.clock.monotonic_ms() + _GIVEN_WAY_MS
        await self._stop_acting()

    async def apply_members(self, members: Mapping[int, str]) -> None:
        """Take in who is there, by id; nobody is no news."""
        if not members:
            return  # no name server answers, or all were just started: whoever acts goes on
        if members[min(members)] != self._context.address or self._holds_back():
            await self._stop_acting()
        # Name servers list this slave as the lowest id until the returning master registers, which is after it asked
        # this slave to give way: acting again in between would deliver messages that the master delivers, too.
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
        """Raises RemotingError: the new master does not answer yet; to be tried again."""
        if master is None:
            _log.warning("the master %s is gone", self._master)
            self._on_master(None, None)
        else:
            ha_address = await self._ha_address_of(master)
            self._on_master(master, ha_address)
            # Clients whose pulls are held here would wait for messages that the master has: answered, they go to it.
            self._context.long_polling.wake_all()
            _log.info("the master is %s, its log is at %s", master, ha_address)
        self._master = master  # last: what raises above is tried again with the next look

    async def _ha_address_of(self, master: str) -> str | None:
        """Return where a master is followed; None when it does not say: its registration will."""
        answer = await self._calls.call(master, request(RequestCode.EXCHANGE_BROKER_HA_INFO))
        return decode_header_leniently(answer, HaInfo).master_ha_address

    def _start_acting(self) -> None:
        assert not self.is_acting, "acting begins once, or check-back would ask twice"
        assert self._check_back is None, "what an earlier time began has ended"
        context, self.is_acting = self._context, True
        # A version of its own, so that slaves and the returning master see that the offsets moved.
        context.offsets.advance_version()
        if self._remote_put is None:
            _log.warning("acting as master: due messages wait for the master, because enableRemoteEscape is false")
            return
        _log.warning("acting as master: due messages are put at other brokers")
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
        """Returns when nothing is on its way any more, whoever stopped it; may be cancelled, and called again then."""
        # Two may stop at a time, a look and a returning master: the second one must not return before all is at rest.
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
            assert not self.is_acting, "what stops begins anew only when this is over"


_TRIES = 12
_PAUSE_SECONDS = 1.0
_MEMBER_TIMEOUT_MS = 5000


class PreOnline:
    """Meets the members of a broker's group; ``ha_address``: where the broker's own log is followed."""

    def __init__(
        self, context: ReplicationContext, registration: Registration, client: RemotingClient, *, ha_address: str
    ) -> None:
        self._context = context
        self._registration = registration
        self._calls = BrokerCalls(client, _MEMBER_TIMEOUT_MS)
        self._ha_address = ha_address

    async def run(self) -> None:
        """Take over from whoever is there; the broker may register when this returns."""
        others: list[str] = []
        for _ in range(_TRIES):
            members = await self._registration.members()
            own_id = self._context.settings.broker_id
            is_slave = own_id != MASTER_ID
            if is_slave and MASTER_ID in members:
                return  # its tables are copied soon
            others = [address for broker_id, address in sorted(members.items()) if broker_id != own_id]
            if all([await self._meet(address, is_slave=is_slave) for address in others]):
                return
            await asyncio.sleep(_PAUSE_SECONDS)
        _log.warning("registering without what the others did: %s", ", ".join(others))

    async def _meet(self, address: str, *, is_slave: bool) -> bool:
        """Take over the offsets of a member; False when that has to be tried again."""
        store = self._context.store
        own = HaInfo(self._ha_address, store.max_physical_offset, self._context.address)
        try:
            if not is_slave:
                await self._calls.ask(address, RequestCode.EXCHANGE_BROKER_HA_INFO, own)
            # Asked behind the exchange, which returns when the acting master's offsets do not move any more.
            delays = await self._calls.delay_offsets(address)
            offsets = await self._calls.consumer_offsets(address)
            await self._take_timer(address)
            self._context.schedule.merge_forward(delays)
            self._context.offsets.merge_forward(offsets)
        except RmqError as error:
            _log.warning("cannot take over the offsets of %s, trying again: %s", address, error)
            return False
        # At once: a crash before the next round would have the messages that were consumed there delivered again.
        self._context.offsets.persist()
        return True

    async def _take_timer(self, address: str) -> None:
        if self._context.timer is not None:
            answer = await self._calls.call(address, request(RequestCode.GET_TIMER_CHECK_POINT))
            if answer.code == ResponseCode.SUCCESS:  # else it has no timer
                self._context.timer.merge_forward(decode_timer_checkpoint(answer.payload))

"""A slave's copies of its master's tables (``SlaveSynchronize``). `slave` copies the messages themselves.

============================  ====  =====  ======================================================================
table                         code  port   action of the slave
============================  ====  =====  ======================================================================
topics, also static topics      21  fast   replaces its own table if the versions differ
consumer offsets                43  main   merges them into its own table. Offsets that only the slave has stay
offsets in lite topics          43  main   enters what changed (`lite_offsets`). It is requested every 5 s
delay offsets                   45  main   replaces its own table
groups and forbidden topics    201  main   replaces its own table if the versions differ
request modes                  402  main   writes them into their file
waiting timed messages          61  fast   replaces its own counts if the versions differ
timer check point               60  fast   adopts it (`Timer.replace_with`). It is requested every 3 s
============================  ====  =====  ======================================================================

The *fast* port is the main port - 2. If the master does not listen there, the slave uses the main port. If the fast
port returns no table, the slave uses the main port for the rest of the copy: another program may listen there. The
tables are copied as soon as the master is known or changes, and then every minute. (The reference waits a minute before
the first copy.) A failure of a step is logged once, and the other steps continue. The queue of a record depends on the
type of its topic. If the slave does not have the topic, the record waits until the slave has requested the master's
topics (`SlaveSync.is_batch_topic`). 5.3 and later return topics and groups in pages if this is configured. Pages with
the same table version belong together.
A slave with a timer copies the timer state, unless it acts for its master. Use this module only on the event loop.
Source: store.md §21.6; behaviour.md §10.1; remoting.md §4.4.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from rmqkit.broker.delay.levels import Schedule
from rmqkit.broker.delay.timer import Timer
from rmqkit.broker.replication.lite_offsets import LiteOffsetCopies
from rmqkit.broker.tables.groups import GroupTable, request_modes_file
from rmqkit.broker.tables.offsets import OffsetTable
from rmqkit.broker.tables.topics import TopicTable
from rmqkit.clock import SYSTEM_CLOCK, Clock
from rmqkit.errors import BodyError, ConnectFailed, RmqError
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import Command, decode_header_leniently, request
from rmqkit.protocol.fastjson import decode_as
from rmqkit.protocol.names import is_light
from rmqkit.protocol.schemas.brokers import TimerMetrics, decode_timer_checkpoint
from rmqkit.protocol.schemas.groups import GroupConfigsRequest, GroupConfigsResponse, SubscriptionGroupTable
from rmqkit.protocol.schemas.pop import MessageRequestModes
from rmqkit.protocol.schemas.topics import TopicConfigsRequest, TopicConfigsResponse, TopicConfigTable
from rmqkit.remoting.address import join_address, split_address
from rmqkit.remoting.client import RemotingClient, expect_success
from rmqkit.remoting.tasks import Tasks, keep_doing
from rmqkit.rpc import BrokerCalls

__all__ = ["SlaveSync", "fast_address"]

_PERIOD_MS = 60_000.0
_TIMER_PERIOD_MS = 3000.0
_LITE_PERIOD_MS = 5000.0
_TIMEOUT_MS = 10_000
_PAGE_ENTRIES_MAX = 2000
_PAGES_MAX = 1000
_ASK_AGAIN_SECONDS = 1.0
_GONE_AFTER_TRIES, _QUEUES = 10, 16
_FAST_PORT_BELOW = 2

R = TypeVar("R")
T = TypeVar("T", TopicConfigTable, SubscriptionGroupTable)
_log = logging.getLogger(__name__)


class SlaveSync:
    """The copies of a master's tables at one slave. ``store_root``: the folder with the file of the request modes."""

    def __init__(
        self,
        topics: TopicTable,
        groups: GroupTable,
        offsets: OffsetTable,
        schedule: Schedule,
        client: RemotingClient,
        store_root: Path,
        timer: Timer | None = None,
        clock: Clock = SYSTEM_CLOCK,
        lite: LiteOffsetCopies | None = None,
    ) -> None:
        self._lite = lite
        self._topics = topics
        self._groups = groups
        self._offsets = offsets
        self._schedule = schedule
        self._timer = timer
        self._clock = clock
        self._calls = BrokerCalls(client, _TIMEOUT_MS)
        self._modes_file = request_modes_file(store_root)
        self._modes: MessageRequestModes | None = None
        self._master: str | None = None
        self._wake = asyncio.Event()
        self._timer_wake = asyncio.Event()
        self._lite_wake = asyncio.Event()
        self._tasks = Tasks()
        self._failures: dict[str, RmqError] = {}
        self._missing: set[str] = set()
        self._asked_for: set[str] = set()
        self._useless_fast: str | None = None

    @property
    def master(self) -> str | None:
        """The address of the master whose tables are copied; None without a master."""
        return self._master

    def follow(self, master: str | None) -> None:
        """Start to copy the tables of the broker at an address. None: stop. Do nothing if the address is unchanged."""
        if master != self._master:
            self._master = master
            self._wake.set()
            self._timer_wake.set()
            self._lite_wake.set()
        if not len(self._tasks):
            self._tasks.start(keep_doing(self._round, wake=self._wake, name="slave sync"), "slave sync")
            if self._timer is not None:
                self._tasks.start(keep_doing(self._timer_round, wake=self._timer_wake, name="timer sync"), "timer sync")
            if self._lite is not None:
                self._tasks.start(keep_doing(self._lite_round, wake=self._lite_wake, name="lite sync"), "lite sync")

    async def close(self) -> None:
        await self._tasks.close()

    async def _round(self) -> float:
        self._useless_fast = None
        for name, step in (
            ("topics", self._copy_topics),
            ("consumer offsets", self._copy_offsets),
            ("delay offsets", self._copy_delay_offsets),
            ("groups", self._copy_groups),
            ("request modes", self._copy_modes),
            ("counts of timed messages", self._copy_timer_metrics),
        ):
            await self._try(name, step)
        self._asked_for.clear()
        return _PERIOD_MS

    async def _timer_round(self) -> float:
        await self._try("timer check point", self._copy_timer_checkpoint)
        return _TIMER_PERIOD_MS

    async def _lite_round(self) -> float:
        await self._try("offsets in lite topics", self._copy_lite_offsets)
        return _LITE_PERIOD_MS

    async def copy_topics(self) -> None:
        """Copy the topics now, so that their queues are created with the right type. Log a failure; do not raise it."""
        await self._try("topics", self._copy_topics)

    def is_batch_topic(self, topic: str) -> bool:
        """Return True if a topic's queues are BatchConsumeQueues. The slave's store calls this when it creates a queue.
        Raises BlockingIOError: the slave requests the topics first. The caller retries in a moment."""
        config = self._topics.get(topic)
        if config is None and self._master is not None and topic not in self._asked_for:
            # A queue never changes its type. With the wrong type all its entries would have the wrong size.
            if not self._missing:
                self._tasks.start(self._ask_for_missing(), "topics of new records")
            self._missing.add(topic)
            raise BlockingIOError(errno.EAGAIN, f"the master is asked about topic {topic}")
        return config is not None and config.is_batch_queue

    async def _ask_for_missing(self) -> None:
        """Copy the topics until the copy succeeds, or until the master cannot be reached for `_GONE_AFTER_TRIES`.

        If the master died before it sent the topics, its acknowledged messages have to be readable here. They get
        queues with the reference's defaults.
        """
        assert self._missing, "at least one topic is missing"
        in_vain = 0
        try:
            while not await self._try("topics", self._copy_topics):
                in_vain = in_vain + 1 if isinstance(self._failures["topics"], ConnectFailed) else 0
                if in_vain >= _GONE_AFTER_TRIES:
                    for topic in sorted(self._missing):
                        _log.warning("topic %s gets ordinary queues: the master left before it sent the topic", topic)
                        if not is_light(topic):
                            self._topics.ensure(topic, _QUEUES, soon=True)
                    break
                await asyncio.sleep(_ASK_AGAIN_SECONDS)
            self._asked_for |= self._missing  # topics that the master does not have get ordinary queues
        finally:
            self._missing.clear()

    async def _try(self, name: str, step: Callable[[str], Awaitable[None]]) -> bool:
        """Run a step, unless there is no master. Return False if the step failed."""
        if self._master is None:
            return True
        try:
            await step(self._master)
        except RmqError as error:
            if str(self._failures.get(name)) != str(error):
                _log.warning("cannot copy %s of the master, trying again: %s", name, error)
            self._failures[name] = error
            return False
        self._failures.pop(name, None)
        return True

    # ---- the steps

    async def _copy_topics(self, master: str) -> None:
        async def page(first: int, version: str) -> tuple[TopicConfigTable, int | None]:
            header = TopicConfigsRequest(first, version, _PAGE_ENTRIES_MAX)
            return await self._ask_fast(master, RequestCode.GET_ALL_TOPIC_CONFIG, _topic_page, header)

        copied = await _whole(page, lambda table: table.topic_config_table)
        # Each step checks the master again: it may have changed during the request, and the table of the new master
        # must not be replaced.
        if master == self._master and self._topics.replace_with(copied):
            _log.info("took over %d topics of %s", len(copied.topic_config_table), master)

    async def _copy_offsets(self, master: str) -> None:
        # Take the time before the request: the copy may lack offsets that the master commits while it answers.
        asked_ms = self._clock.now_ms()
        copied = await self._calls.consumer_offsets(master)
        if master == self._master:
            self._offsets.merge(copied, asked_ms=asked_ms)

    async def _copy_lite_offsets(self, master: str) -> None:
        if self._lite is not None:
            await self._lite.copy(self._calls, master)

    async def _copy_delay_offsets(self, master: str) -> None:
        copied = await self._calls.delay_offsets(master)
        if master == self._master:
            self._schedule.replace_with(copied)

    async def _copy_groups(self, master: str) -> None:
        async def page(first: int, version: str) -> tuple[SubscriptionGroupTable, int | None]:
            header = GroupConfigsRequest(first, version, _PAGE_ENTRIES_MAX)
            answer = await self._calls.ask(master, RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG, header)
            total = decode_header_leniently(answer, GroupConfigsResponse).total_group_num
            return decode_as(answer.payload, SubscriptionGroupTable), total

        copied = await _whole(page, lambda table: table.subscription_group_table)
        if master == self._master and self._groups.replace_with(copied):
            _log.info("took over %d groups of %s", len(copied.subscription_group_table), master)

    async def _copy_modes(self, master: str) -> None:
        answer = await self._calls.call(master, request(RequestCode.GET_ALL_MESSAGE_REQUEST_MODE))
        if answer.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
            return  # 4.x has no request modes: every group pulls
        copied = decode_as(expect_success(answer, master).payload, MessageRequestModes)
        if master == self._master and copied != self._modes:
            self._modes_file.save(copied)
            self._modes = copied

    async def _copy_timer_metrics(self, master: str) -> None:
        if self._timer is not None and self._timer.is_follower:
            copied = await self._ask_fast(
                master, RequestCode.GET_TIMER_METRICS, lambda answer: decode_as(answer.payload, TimerMetrics)
            )
            if master == self._master:
                self._timer.take_counts(copied)

    async def _copy_timer_checkpoint(self, master: str) -> None:
        if self._timer is not None and self._timer.is_follower:
            checkpoint = await self._ask_fast(
                master, RequestCode.GET_TIMER_CHECK_POINT, lambda answer: decode_timer_checkpoint(answer.payload)
            )
            if master == self._master:
                self._timer.replace_with(checkpoint)

    async def _ask_fast(
        self, master: str, code: int, read: Callable[[Command], R], header: msgspec.Struct | None = None
    ) -> R:
        """Request a table from the fast port, or else from the main port. Return the answer, decoded by ``read``.

        Raises the error of the main port, which shows if the master is there: another program may listen on the fast
        port.
        """
        fast = fast_address(master)
        if fast is not None and fast != self._useless_fast:
            try:
                return read(await self._calls.ask(fast, code, header))
            except ConnectFailed:
                _log.debug("%s does not listen on its fast port", master)
            except RmqError as error:
                # A port that does not answer costs the whole timeout, so try it only once per copy of the tables.
                self._useless_fast = fast
                _log.info("using the main port of %s for the rest of this copy: %s", master, error)
        return read(await self._calls.ask(master, code, header))


def _topic_page(answer: Command) -> tuple[TopicConfigTable, int | None]:
    total = decode_header_leniently(answer, TopicConfigsResponse).total_topic_num
    return decode_as(answer.payload, TopicConfigTable), total


def fast_address(address: str) -> str | None:
    """Return the address of a broker's fast port (``listenPort`` - 2), or None if the port number is too low."""
    try:
        host, port = split_address(address)
    except ValueError:
        return None
    return join_address(host, port - _FAST_PORT_BELOW) if port > _FAST_PORT_BELOW else None


async def _whole(
    page: Callable[[int, str], Awaitable[tuple[T, int | None]]], entries_of: Callable[[T], dict[str, Any]]
) -> T:
    """Return a table that the master sends as a whole or in pages. If the version changes between two pages, continue
    with the new table.

    Raises BodyError: the pages do not end.
    """
    whole, total = await page(0, "")
    for _ in range(_PAGES_MAX):
        count = len(entries_of(whole))
        if total is None or count >= total:
            return whole
        following, total = await page(count, msgspec.json.encode(whole.data_version).decode())
        if following.data_version != whole.data_version:
            whole = following  # the table changed between two pages: the earlier pages are from the old table
        elif not entries_of(following).keys() - entries_of(whole).keys():
            return whole
        else:
            entries_of(whole).update(entries_of(following))
    raise BodyError(f"a table of the master has no end after {_PAGES_MAX} pages: check the answers of the master")

"""Requests of operators about the broker itself: its state, its settings, and unsupported parts.

``mqadmin clusterList`` and ``brokerStatus`` show GET_BROKER_RUNTIME_INFO (28). Every value is a text.
Requests are handled when they arrive, without the queue of a thread pool. So the reported size of a queue is the number
of requests that wait for disk, slaves or messages before they are answered. ``CAPACITIES`` has the maximum sizes. The
head wait time of a queue is always 0. Puts do not wait for a lock of the page cache, and dispatched entries are not
buffered (`ALWAYS`).

GET_BROKER_CONFIG (26) and UPDATE_BROKER_CONFIG (25) show and change the settings. Every change sets a new version,
which is part of the answer.

Requests for parts that rmqkit does not have are refused like unknown requests, with the reason in the remark. If the
reference refuses such a request because the part is off by default, the answer is the same as the reference's.
Source: remoting.md §4, §4.4, §6.6; behaviour.md §9.9.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from rmqkit.broker.durability import WAITING_MAX
from rmqkit.broker.handlers import Handlers, answers
from rmqkit.broker.operations import OperationsContext
from rmqkit.broker.pull.long_polling import HELD_MAX
from rmqkit.broker.settings import WITHOUT_EFFECT
from rmqkit.broker.unused_settings import UNUSED
from rmqkit.errors import RecordCorrupt
from rmqkit.protocol.codes import CURRENT_VERSION, RequestCode, ResponseCode, version_name
from rmqkit.protocol.command import Command, decode_fields, reply
from rmqkit.protocol.names import SCHEDULE_TOPIC
from rmqkit.protocol.record import decode_record
from rmqkit.protocol.schemas.brokers import BrokerConfigResponse, bytes_text
from rmqkit.protocol.schemas.topics import DataVersion, KVTable
from rmqkit.remoting.connection import Connection
from rmqkit.remoting.router import Router, change_settings, settings_reply
from rmqkit.store.log.commit_log import log_directories
from rmqkit.store.message_store import MessageStore
from rmqkit.store.retention import used_percent
from rmqkit.system import disk
from rmqkit.unused import unused_notes

CAPACITIES = {"pull": HELD_MAX, "litePull": HELD_MAX, "send": WAITING_MAX, "query": WAITING_MAX, "ack": WAITING_MAX}

# The values of a runtime table that apply unless another value is known.
ALWAYS = {
    **{f"{pool}ThreadPoolQueueCapacity": str(count) for pool, count in CAPACITIES.items()},
    **{f"{pool}ThreadPoolQueueSize": "0" for pool in CAPACITIES},
    **{f"{pool}ThreadPoolQueueHeadWaitTimeMills": "0" for pool in CAPACITIES},
    "EndTransactionThreadPoolQueueCapacity": str(WAITING_MAX),
    **dict.fromkeys(("EndTransactionQueueSize", "pageCacheLockTimeMills", "dispatchMaxBuffer"), "0"),
    "remainTransientStoreBufferNumbs": str((1 << 31) - 1),
}

_MORNINGS = ("YesterdayMorning", "TodayMorning", "TodayNow")
_RATES = {"putTps": "puts", "getFoundTps": "found", "getMissTps": "missed", "getTransferredTps": "BROKER_GET_NUMS"}


class RuntimeInfoHandlers(Handlers[OperationsContext]):
    """The handler that returns the broker's current state."""

    def __init__(self, context: OperationsContext) -> None:
        super().__init__(context)
        self._log_directories = log_directories(self._context.store.root, context.store_settings)[0]
        self._boot_ms = self._context.clock.now_ms()

    @answers(RequestCode.GET_BROKER_RUNTIME_INFO)
    def runtime_info(self, connection: Connection, command: Command) -> Command:
        table = (
            # Join them in this order: known values replace the default values.
            ALWAYS | self._process() | self._counted() | self._puts() | self._delayed() | self._log() | self._disks()
        )
        return reply(command, body=msgspec.json.encode(KVTable(dict(sorted(table.items())))))

    def _process(self) -> dict[str, str]:
        return {
            "brokerVersionDesc": version_name(CURRENT_VERSION),
            "brokerVersion": str(CURRENT_VERSION),
            "brokerActive": "true" if self._context.store.is_writable else "false",
            "bootTimestamp": str(self._boot_ms),
            "runtime": run_time_text(max(0, self._context.clock.now_ms() - self._boot_ms)),
        }

    def _counted(self) -> dict[str, str]:
        """Return counts of messages that were put and got. Totals begin at the start and exclude system topics."""
        statistics, answered = self._context.statistics, dict[str, str]()
        for way in ("Put", "Get"):
            days = statistics.days(f"BROKER_{way.upper()}_NUMS_WITHOUT_SYSTEM_TOPIC")
            answered |= {f"msg{way}Total{when}": str(total) for when, total in zip(_MORNINGS, days, strict=True)}
        rates = {key: statistics.rates(name) for key, name in _RATES.items()}
        asked = [sum(both) for both in zip(rates["getFoundTps"], rates["getMissTps"], strict=True)]
        answered["getTotalTps"] = _rates_text(asked)
        return answered | {key: _rates_text(several) for key, several in rates.items()}

    def _puts(self) -> dict[str, str]:
        """Return counts and durations of all puts since the start, including puts into system topics."""
        statistics, settings = self._context.statistics, self._context.settings
        times, count, size = statistics.put_times, statistics.put_count, statistics.put_bytes
        waiting = 0 if self._context.durability is None else self._context.durability.waiting_count
        return {
            "putMessageTimesTotal": str(count),
            "putMessageSizeTotal": str(size),
            "putMessageAverageSize": str(round(size / count, 2) if count else 0.0),
            "putMessageFailedTimes": str(statistics.puts_failed),
            "putMessageEntireTimeMax": str(times.longest_ms),
            "putMessageDistributeTime": str(times),
            "putLatency99": f"{times.percentile(0.99):.2f}",
            "putLatency999": f"{times.percentile(0.999):.2f}",
            "getMessageEntireTimeMax": str(int(statistics.get_ms_max)),
            "startAcceptSendRequestTimeStamp": str(settings.accept_sends_from_ms),
            "sendThreadPoolQueueSize": str(waiting),
        }

    def _delayed(self) -> dict[str, str]:
        timer, levels = self._context.timer, self._context.schedule.offsets().offset_table
        ends = {level: self._context.store.max_offset(SCHEDULE_TOPIC, level - 1) for level in levels}
        return {
            **{f"scheduleMessageOffset_{level}": f"{offset},{ends[level]}" for level, offset in levels.items()},
            "timerReadBehind": str(0 if timer is None else timer.read_behind_ms // 1000),
            "timerOffsetBehind": str(0 if timer is None else timer.offset_behind),
            "timerCongestNum": str(0 if timer is None else timer.pending),
            "timerEnqueueTps": str(0.0 if timer is None else round(timer.rates[0], 3)),
            "timerDequeueTps": str(0.0 if timer is None else round(timer.rates[1], 3)),
        }

    def _log(self) -> dict[str, str]:
        store, pool = self._context.store, self._context.store.log.pool
        uncommitted = 0 if pool is None else max(0, store.max_physical_offset - pool.committed_offset)
        buffers = (
            {}
            if pool is None
            else {
                "remainTransientStoreBufferNumbs": str(pool.free_count),
                "remainHowManyDataToCommit": bytes_text(uncommitted),
            }
        )
        return buffers | {
            "commitLogMinOffset": str(store.min_physical_offset),
            "commitLogMaxOffset": str(store.max_physical_offset),
            "dispatchBehindBytes": str(max(0, store.max_physical_offset - store.dispatched_offset)),
            "remainHowManyDataToFlush": bytes_text(max(0, store.max_physical_offset - store.durable_offset)),
            "earliestMessageTimeStamp": str(earliest_store_time(store)),
        }

    def _disks(self) -> dict[str, str]:
        first = self._log_directories[0]  # missing at a slave without any data
        space = disk.space(first if disk.exists(first) else self._context.store.root)
        total, free = space.f_blocks * space.f_frsize, space.f_bfree * space.f_frsize
        ratios = {path: disk_ratio(path) for path in self._log_directories}
        return {
            "commitLogDirCapacity": f"Total : {bytes_text(total)}, Free : {bytes_text(free)}.",
            "commitLogDiskRatio": str(min(ratios.values())),
            "consumeQueueDiskRatio": str(disk_ratio(self._context.store.root)),
            **{f"commitLogDiskRatio_{path}": str(ratio) for path, ratio in ratios.items()},
        }


def _rates_text(rates: Iterable[float]) -> str:
    return " ".join(str(round(rate, 3)) for rate in rates)


def earliest_store_time(store: MessageStore) -> int:
    """Return the store time of the oldest message in ms since the epoch, or -1 without messages."""
    offset = store.min_physical_offset
    record = store.log.record_at(offset) if offset >= 0 else None
    try:
        return -1 if record is None else decode_record(record).store_timestamp
    except RecordCorrupt:
        return -1


def disk_ratio(path: Path) -> float:
    """Return the used part of a disk as a ratio, rounded up to whole percents."""
    return used_percent(path) / 100


def run_time_text(ms: float) -> str:
    """Return the run time of the broker as a text: ``[ 0 days, 0 hours, 7 minutes, 11 seconds ]``."""
    minutes, seconds = divmod(int(ms // 1000), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"[ {days} days, {hours} hours, {minutes} minutes, {seconds} seconds ]"


_log = logging.getLogger(__name__)


class ConfigHandlers(Handlers[OperationsContext]):
    """The handlers of requests about settings."""

    def __init__(self, context: OperationsContext) -> None:
        super().__init__(context)
        self._configuration = context.configuration
        self._version = DataVersion(timestamp=self._context.clock.now_ms())
        context.configuration.listeners.append(self._changed)

    @answers(RequestCode.GET_BROKER_CONFIG)
    def config(self, connection: Connection, command: Command) -> Command:
        header = BrokerConfigResponse(msgspec.json.encode(self._version).decode())
        return settings_reply(self._configuration, command, header)

    @answers(RequestCode.UPDATE_BROKER_CONFIG, admins_only=True, lane="administration")
    def update_config(self, connection: Connection, command: Command) -> Command:
        """Change hot settings. The file is written before the answer."""
        black_list = self._context.settings.config_black_list
        return change_settings(self._configuration, command, black_list, WITHOUT_EFFECT)

    def _changed(self, keys: Sequence[str]) -> None:
        self._version.advance(self._context.clock.now_ms())
        texts = self._configuration.texts()
        for note in unused_notes(UNUSED, {key: texts[key] for key in keys}):
            _log.warning("%s", note)


_NO_COLD_DATA = "rmqkit does not slow down consumers that read old data"
_NO_ROCKSDB = "rmqkit keeps consume queues in files and tables in config/*.json, not in RocksDB"

# The reasons to refuse requests that Apache's broker answers.
REASONS: dict[int, str] = {
    RequestCode.UPDATE_COLD_DATA_FLOW_CTR_CONFIG: _NO_COLD_DATA,
    RequestCode.REMOVE_COLD_DATA_FLOW_CTR_CONFIG: _NO_COLD_DATA,
    RequestCode.GET_COLD_DATA_FLOW_CTR_INFO: _NO_COLD_DATA,
    RequestCode.SET_COMMITLOG_READ_MODE: "rmqkit leaves reading ahead to the operating system",
    RequestCode.CHECK_ROCKSDB_CQ_WRITE_PROGRESS: _NO_ROCKSDB,
    RequestCode.EXPORT_ROCKSDB_CONFIG_TO_JSON: _NO_ROCKSDB,
    RequestCode.POP_ROLLBACK: "rmqkit keeps what is popped in revive topics, not in a database of its own",
}

_ENGINE_TYPE = "E_T"
_ENGINE_OF_FILES = "F"


class UnsupportedHandlers(Handlers[OperationsContext]):
    """The handlers that refuse unsupported requests. Register them last: they handle only codes without a handler."""

    def register(self, dispatch: Router) -> None:
        super().register(dispatch)
        # Register only codes without a handler.
        for code in REASONS.keys() - dispatch.codes:
            dispatch.register(code, self.refuse)

    def refuse(self, connection: Connection, command: Command) -> Command:
        return _refused(command, REASONS[command.code])

    @answers(RequestCode.SWITCH_TIMER_ENGINE)
    def timer_engine(self, connection: Connection, command: Command) -> Command:
        """Accept a switch to the engine that uses files (``F``), which is the only engine. Refuse other engines."""
        engine = decode_fields(command).get(_ENGINE_TYPE)
        if not engine:
            return reply(command, ResponseCode.INVALID_PARAMETER, "param error, extFields is null")
        return reply(command) if engine == _ENGINE_OF_FILES else _refused(command, _NO_ROCKSDB)

    @answers(RequestCode.GET_BROKER_EPOCH_CACHE)
    def epochs(self, connection: Connection, command: Command) -> Command:
        return reply(command, ResponseCode.SYSTEM_ERROR, "this request only for controllerMode ")


def _refused(command: Command, reason: str) -> Command:
    return reply(
        command, ResponseCode.REQUEST_CODE_NOT_SUPPORTED, f" request type {command.code} not supported: {reason}"
    )

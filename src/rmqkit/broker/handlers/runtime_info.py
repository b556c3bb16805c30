"""GET_BROKER_RUNTIME_INFO (28): what ``mqadmin clusterList`` and ``brokerStatus`` show. Every value is a text.

Measured here: version, times since the start, the log's bounds, what waits to be dispatched and flushed, the disks.
Requests are handled as they come, no queue stands before them, so queue sizes and waits are 0. What this broker does
not count is told as a broker that has done nothing yet tells it (`NOT_COUNTED`): the tools cannot do without.
Source: remoting.md §6.6.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from rmqkit.broker.handlers.answers import Handlers, answers
from rmqkit.broker.parts import Parts
from rmqkit.errors import RecordCorrupt
from rmqkit.protocol.bodies.namesrv import KVTable
from rmqkit.protocol.codes import CURRENT_VERSION, RequestCode, version_name
from rmqkit.protocol.command import Command, reply
from rmqkit.protocol.record import decode_record
from rmqkit.remoting.connection import Connection
from rmqkit.store.commit_log import log_directories
from rmqkit.store.retention import used_percent

__all__ = ["NOT_COUNTED", "RuntimeInfoHandlers", "bytes_text", "disk_ratio", "run_time_text"]

_NO_RATES = "0.0 0.0 0.0"
_POOLS = ("send", "pull", "litePull", "query", "ack")

NOT_COUNTED = {
    **dict.fromkeys(
        (
            *("msgPutTotalYesterdayMorning", "msgPutTotalTodayMorning", "msgPutTotalTodayNow"),
            *("msgGetTotalYesterdayMorning", "msgGetTotalTodayMorning", "msgGetTotalTodayNow"),
            *("putMessageEntireTimeMax", "putMessageFailedTimes", "putMessageSizeTotal", "putMessageTimesTotal"),
            *("getMessageEntireTimeMax", "pageCacheLockTimeMills", "startAcceptSendRequestTimeStamp"),
            *("timerReadBehind", "timerOffsetBehind", "timerCongestNum"),
        ),
        "0",
    ),
    **dict.fromkeys(("putTps", "getFoundTps", "getMissTps", "getTotalTps", "getTransferredTps"), _NO_RATES),
    **dict.fromkeys(("timerEnqueueTps", "timerDequeueTps", "putMessageAverageSize"), "0.0"),
    **dict.fromkeys(("putLatency99", "putLatency999"), "0.00"),
}
"""Counters and rates of Java's broker that this one does not keep, with the values of a fresh Java broker."""

_NO_QUEUES = {
    **{f"{pool}ThreadPoolQueueSize": "0" for pool in _POOLS},
    **{f"{pool}ThreadPoolQueueHeadWaitTimeMills": "0" for pool in _POOLS},
    "EndTransactionQueueSize": "0",
}


class RuntimeInfoHandlers(Handlers):
    """Answers with the broker's state of the moment."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self._log_directories = log_directories(self._store.root, parts.store_settings)[0]
        self._boot_ms = self._clock.now_ms()
        self._started_ms = self._clock.monotonic_ms()

    @answers(RequestCode.GET_BROKER_RUNTIME_INFO)
    def runtime_info(self, connection: Connection, command: Command) -> Command:
        """Everything, in one table."""
        table = NOT_COUNTED | _NO_QUEUES | self._process() | self._log() | self._disks()
        return reply(command, body=msgspec.json.encode(KVTable(dict(sorted(table.items())))))

    def _process(self) -> dict[str, str]:
        return {
            "brokerVersionDesc": version_name(CURRENT_VERSION),
            "brokerVersion": str(CURRENT_VERSION),
            "brokerActive": "true" if self._store.is_writable else "false",
            "bootTimestamp": str(self._boot_ms),
            "runtime": run_time_text(self._clock.monotonic_ms() - self._started_ms),
        }

    def _log(self) -> dict[str, str]:
        store = self._store
        return {
            "commitLogMinOffset": str(store.min_physical_offset),
            "commitLogMaxOffset": str(store.max_physical_offset),
            "dispatchBehindBytes": str(max(0, store.max_physical_offset - store.dispatched_offset)),
            "remainHowManyDataToFlush": bytes_text(max(0, store.max_physical_offset - store.durable_offset)),
            "earliestMessageTimeStamp": str(self._earliest_store_time()),
        }

    def _earliest_store_time(self) -> int:
        """When the oldest message was stored, -1 without one."""
        offset = self._store.min_physical_offset
        record = self._store.record_at(offset) if offset >= 0 else None
        try:
            return -1 if record is None else decode_record(record).store_timestamp
        except RecordCorrupt:
            return -1

    def _disks(self) -> dict[str, str]:
        disk = os.statvfs(self._log_directories[0])
        total, free = disk.f_blocks * disk.f_frsize, disk.f_bfree * disk.f_frsize
        ratios = {path: disk_ratio(path) for path in self._log_directories}
        return {
            "commitLogDirCapacity": f"Total : {bytes_text(total)}, Free : {bytes_text(free)}.",
            "commitLogDiskRatio": str(min(ratios.values())),
            "consumeQueueDiskRatio": str(disk_ratio(self._store.root)),
            **{f"commitLogDiskRatio_{path}": str(ratio) for path, ratio in ratios.items()},
        }


def disk_ratio(path: Path) -> float:
    """The used part of a disk, rounded up to percent."""
    return used_percent(path) / 100


def bytes_text(count: int) -> str:
    """Bytes in the largest unit that leaves at least 1: ``0 B``, ``1.5 KiB``, ``252.0 GiB``."""
    if count < 1024:
        return f"{count} B"
    exponent = min(6, (count.bit_length() - 1) // 10)
    return f"{count / 1024**exponent:.1f} {'KMGTPE'[exponent - 1]}iB"


def run_time_text(ms: float) -> str:
    """How long the broker runs: ``[ 0 days, 0 hours, 7 minutes, 11 seconds ]``."""
    minutes, seconds = divmod(int(ms // 1000), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"[ {days} days, {hours} hours, {minutes} minutes, {seconds} seconds ]"

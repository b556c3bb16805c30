"""Settings of the store (`MessageStoreConfig`), by their RocketMQ keys. Source: store.md §23."""

from __future__ import annotations

import enum
import re
from typing import Annotated

from msgspec import Struct

from rmqkit.errors import HeaderError, SettingsError
from rmqkit.settings import Setting

__all__ = ["FlushDiskType", "StoreSettings", "delay_level", "delivery_time", "parse_delay_levels"]

_I32_MAX = 0x7FFFFFFF


class FlushDiskType(enum.Enum):
    """The place where a message must be stored before its send is answered: the page cache, or the disk.
    Source: store.md §13.1.
    """

    ASYNC_FLUSH = "ASYNC_FLUSH"
    SYNC_FLUSH = "SYNC_FLUSH"


class StoreSettings(Struct, kw_only=True):
    """The settings of a ``broker.conf`` for the store."""

    # ---- directories
    store_path_root_dir: Annotated[str, Setting("storePathRootDir", "directory of the store")] = "~/store"
    store_path_commit_log: Annotated[
        str,
        Setting(
            "storePathCommitLog",
            "directories of the commit log, separated by commas; default: commitlog in the store directory",
        ),
    ] = ""
    read_only_commit_log_store_paths: Annotated[
        str, Setting("readOnlyCommitLogStorePaths", "commit log directories that get no new files, separated by commas")
    ] = ""

    archive: Annotated[
        str,
        Setting(
            "archive",
            "directory or address (s3://bucket/path) to which full commit log files are copied before they are "
            "deleted; clients can still read them. Default: none",
        ),
    ] = ""
    archive_catalog: Annotated[
        str,
        Setting(
            "archiveCatalog",
            "Iceberg catalog with a table of the archive's segments: kind and address "
            "(sql:sqlite:////path/catalog.db), or a name of ~/.pyiceberg.yaml. Default: none",
        ),
    ] = ""
    archive_table: Annotated[
        str,
        Setting("archiveTable", "table of the catalog. Default: rmqkit and the name of the broker (rmqkit.broker-a)"),
    ] = ""

    # ---- file sizes; a store must always be opened with the sizes with which it was written
    commit_log_file_bytes: Annotated[
        int, Setting("mappedFileSizeCommitLog", "size of a commit log file, in bytes", low=1024, high=_I32_MAX)
    ] = 1 << 30
    consume_queue_file_bytes: Annotated[
        int,
        Setting(
            "mappedFileSizeConsumeQueue",
            "size of a consume queue file in bytes, rounded up to a multiple of 20",
            low=20,
        ),
    ] = 300_000 * 20
    consume_queue_ext_file_bytes: Annotated[
        int, Setting("mappedFileSizeConsumeQueueExt", "size of a consume queue extension file, in bytes", low=64)
    ] = 48 << 20
    batch_consume_queue_file_bytes: Annotated[
        int,
        Setting(
            "mapperFileSizeBatchConsumeQueue",
            "size of a batch queue file in bytes, rounded up to a multiple of 46",
            low=46,
        ),
    ] = 300_000 * 46
    lite_queue_file_bytes: Annotated[
        int,
        Setting(
            "mappedFileSizeLiteQueue",
            "size of a file with queue entries of lite topics, in bytes, rounded up to whole entries of 56 bytes",
            low=56,
            high=_I32_MAX,
        ),
    ] = 64 << 20
    timer_log_file_bytes: Annotated[
        int, Setting("mappedFileSizeTimerLog", "size of a timer log file, in bytes", low=68, high=_I32_MAX)
    ] = 100 << 20
    enable_consume_queue_ext: Annotated[
        bool, Setting("enableConsumeQueueExt", "store tag code, store time and filter bitmap beside the consume queue")
    ] = False
    enable_light_queues: Annotated[
        bool, Setting("enableLmq", "assign offsets in light queues (%LMQ%…) to messages that request it")
    ] = False
    enable_multi_dispatch: Annotated[bool, Setting("enableMultiDispatch", "add messages to their light queues")] = False
    limits_light_queues: Annotated[
        bool,
        Setting("enableLmqQuota", "refuse messages that would create more light queues than maxLmqConsumeQueueNum"),
    ] = True
    light_queue_count_max: Annotated[
        int, Setting("maxLmqConsumeQueueNum", "maximum number of light queues, if enableLmqQuota is true", low=0)
    ] = 20_000

    lite_topic_count_max: Annotated[
        int,
        Setting(
            "maxLiteTopicNum",
            "maximum number of lite topics, each of about 200 bytes of memory; messages to further ones are refused",
            low=0,
        ),
    ] = 2_000_000

    # ---- index
    message_index_enable: Annotated[bool, Setting("messageIndexEnable", "index messages by key")] = True
    message_index_safe: Annotated[
        bool, Setting("messageIndexSafe", "after a crash, rebuild the index from the last full index file")
    ] = False
    hash_slot_count: Annotated[int, Setting("maxHashSlotNum", "number of hash slots in an index file", low=1)] = (
        5_000_000
    )
    index_entry_count: Annotated[int, Setting("maxIndexNum", "number of entries in an index file", low=2)] = 20_000_000
    index_tags: Annotated[bool, Setting("indexTagsEnable", "index tags like keys, as brokers from 5.4 on do")] = True
    query_count_max: Annotated[
        int, Setting("maxMsgsNumBatch", "maximum number of messages that a query by key returns", low=1, hot=True)
    ] = 64

    # ---- limits of a message
    message_bytes_max: Annotated[
        int, Setting("maxMessageSize", "maximum size of a message body, in bytes", low=1, hot=True)
    ] = 4 << 20
    auto_message_version_on_topic_length: Annotated[
        bool, Setting("autoMessageVersionOnTopicLen", "allow topic names of more than 127 bytes (record version 2)")
    ] = True
    append_property_crc: Annotated[
        bool, Setting("enabledAppendPropCRC", "add a checksum of the whole record to the properties of each record")
    ] = False
    message_delay_level: Annotated[
        str, Setting("messageDelayLevel", "the delay levels, from level 1 on, with unit s, m, h or d")
    ] = "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h"

    # ---- timed messages
    timer_wheel_enable: Annotated[bool, Setting("timerWheelEnable", "deliver messages with an exact time")] = True
    timer_precision_ms: Annotated[
        int, Setting("timerPrecisionMs", "precision of delivery times, in ms; do not change it later", low=1)
    ] = 1000
    timer_delay_seconds_max: Annotated[
        int, Setting("timerMaxDelaySec", "maximum delay of a timed message, in seconds", low=1, hot=True)
    ] = 259_200
    timer_roll_window_slots: Annotated[
        int,
        Setting(
            "timerRollWindowSlot",
            "length of a stage in slots, two thirds of fileReservedTime at most; "
            "messages with longer delays wait in stages",
            low=2,
            high=604_740,
        ),
    ] = 172_800
    timer_flush_interval_ms: Annotated[
        int, Setting("timerFlushIntervalMs", "flush interval of timer log and timer wheel, in ms", low=10)
    ] = 1000
    timer_slot_count_max: Annotated[
        int,
        Setting("timerCongestNumEachSlot", "number of messages per slot above which some are refused", low=0, hot=True),
    ] = _I32_MAX

    # ---- flush
    flush_disk_type: Annotated[
        FlushDiskType,
        Setting(
            "flushDiskType", "answer a send when the message is in memory (ASYNC_FLUSH) or on the disk (SYNC_FLUSH)"
        ),
    ] = FlushDiskType.ASYNC_FLUSH
    sync_flush_timeout_ms: Annotated[
        int, Setting("syncFlushTimeout", "with SYNC_FLUSH, ms that a send waits for the disk", low=1, hot=True)
    ] = 5000
    flush_interval_ms: Annotated[
        int,
        Setting("flushIntervalCommitLog", "with ASYNC_FLUSH, flush interval of the commit log, in ms", low=1, hot=True),
    ] = 500
    flush_least_pages: Annotated[
        int,
        Setting(
            "flushCommitLogLeastPages", "minimum number of dirty pages for a flush of the commit log", low=0, hot=True
        ),
    ] = 4
    flush_thorough_interval_ms: Annotated[
        int,
        Setting(
            "flushCommitLogThoroughInterval", "ms after which the commit log is flushed in any case", low=0, hot=True
        ),
    ] = 10_000
    queue_flush_interval_ms: Annotated[
        int, Setting("flushIntervalConsumeQueue", "flush interval of consume queues, in ms", low=1, hot=True)
    ] = 1000
    queue_flush_least_pages: Annotated[
        int,
        Setting("flushConsumeQueueLeastPages", "minimum number of dirty pages for a flush of a queue", low=0, hot=True),
    ] = 2
    queue_flush_thorough_interval_ms: Annotated[
        int,
        Setting("flushConsumeQueueThoroughInterval", "ms after which a queue is flushed in any case", low=0, hot=True),
    ] = 60_000

    # ---- write buffers and new files
    transient_store_pool: Annotated[
        bool,
        Setting("transientStorePoolEnable", "with ASYNC_FLUSH, collect records in memory and write them in groups"),
    ] = False
    transient_store_pool_size: Annotated[
        int, Setting("transientStorePoolSize", "number of buffers, each of the size of a commit log file", low=1)
    ] = 5
    commit_interval_ms: Annotated[
        int, Setting("commitIntervalCommitLog", "interval of writing the buffers, in ms", low=1, hot=True)
    ] = 200
    commit_least_pages: Annotated[
        int, Setting("commitCommitLogLeastPages", "minimum number of pages for a write of the buffers", low=0, hot=True)
    ] = 4
    commit_thorough_interval_ms: Annotated[
        int,
        Setting(
            "commitCommitLogThoroughInterval", "ms after which the buffers are written in any case", low=0, hot=True
        ),
    ] = 200
    warm_mapped_file: Annotated[
        bool, Setting("warmMapedFileEnable", "allocate blocks and pages of new commit log files in advance")
    ] = False

    # ---- retention
    delete_when: Annotated[
        str, Setting("deleteWhen", "hours (local time) at which expired log files are deleted, separated by semicolons")
    ] = "04"
    file_reserved_hours: Annotated[
        int, Setting("fileReservedTime", "hours after the last write until a log file expires", low=0, hot=True)
    ] = 72
    disk_used_percent_max: Annotated[
        int,
        Setting(
            "diskMaxUsedSpaceRatio", "disk usage in percent above which expired files are deleted at any hour", hot=True
        ),
    ] = 75
    disk_clean_forcibly_percent: Annotated[
        int,
        Setting(
            "diskSpaceCleanForciblyRatio",
            "disk usage in percent above which files are deleted even if they are not expired",
            hot=True,
        ),
    ] = 85
    disk_warning_percent: Annotated[
        int, Setting("diskSpaceWarningLevelRatio", "disk usage in percent above which messages are refused", hot=True)
    ] = 90
    clean_forcibly: Annotated[
        bool,
        Setting(
            "cleanFileForciblyEnable",
            "allow deleting files that are not expired when the disk is nearly full",
            hot=True,
        ),
    ] = True
    delete_file_batch_max: Annotated[
        int, Setting("deleteFileBatchMax", "maximum number of log files to delete at a time", low=1, hot=True)
    ] = 10
    clean_resource_interval_ms: Annotated[
        int, Setting("cleanResourceInterval", "interval of checking disk usage and expired files, in ms", low=100)
    ] = 10_000

    # ---- recovery
    check_crc_on_recover: Annotated[
        bool,
        Setting(
            "checkCRCOnRecover",
            "check body checksums in recovery, in pulls of older messages, and when a message is stored again",
        ),
    ] = True
    force_verify_property_crc: Annotated[
        bool, Setting("forceVerifyPropCRC", "in recovery, check the record checksum instead of the body checksum")
    ] = False

    # ---- reading
    transfer_bytes_in_memory_max: Annotated[
        int, Setting("maxTransferBytesOnMessageInMemory", "maximum bytes of a pull from memory", low=1, hot=True)
    ] = 256 << 10
    transfer_count_in_memory_max: Annotated[
        int,
        Setting(
            "maxTransferCountOnMessageInMemory", "maximum number of messages of a pull from memory", low=1, hot=True
        ),
    ] = 32
    transfer_bytes_on_disk_max: Annotated[
        int, Setting("maxTransferBytesOnMessageInDisk", "maximum bytes of a pull from the disk", low=1, hot=True)
    ] = 64 << 10
    transfer_count_on_disk_max: Annotated[
        int,
        Setting(
            "maxTransferCountOnMessageInDisk", "maximum number of messages of a pull from the disk", low=1, hot=True
        ),
    ] = 8
    memory_ratio_max: Annotated[
        int,
        Setting(
            "accessMessageInMemoryMaxRatio",
            "percentage of RAM that is assumed to cache the end of the log",
            low=0,
            high=100,
        ),
    ] = 40
    filter_bytes_max: Annotated[
        int,
        Setting("maxFilterMessageSize", "maximum bytes of consume queue entries that one pull scans", low=20, hot=True),
    ] = 16_000


# ---------------------------------------------------------------- delay levels
# The levels of scheduled messages (``messageDelayLevel``) begin with 1. Source: store.md §18.1.

_UNIT_MS = {"s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_INTEGER = re.compile(r"[+-]?[0-9]{1,10}", re.ASCII)
_LEVEL = re.compile(r"(\d+)([smhd])")


def delay_level(text: str | None) -> int:
    """Return the number in the property DELAY, or 0 if the property is missing. Raises HeaderError: the property is not
    a 32-bit number."""
    if text is None:
        return 0
    level = int(text) if _INTEGER.fullmatch(text) else 1 << 31
    if not -(1 << 31) <= level < 1 << 31:
        raise HeaderError(f'property DELAY is not a number: "{text}"')
    return level


def parse_delay_levels(text: str) -> tuple[int, ...]:
    """Return the delays in ms, level 1 first.
    Raises SettingsError: a level is not a number with unit s, m, h or d, or there is no level."""
    delays: list[int] = []
    for level in text.split():
        match = _LEVEL.fullmatch(level)
        if match is None:
            raise SettingsError(f"messageDelayLevel: level {level!r} must be a number followed by s, m, h or d")
        delays.append(int(match[1]) * _UNIT_MS[match[2]])
    if not delays:
        raise SettingsError("messageDelayLevel contains no level: give at least one, such as 1s")
    return tuple(delays)


def delivery_time(delays: tuple[int, ...], level: int, store_timestamp: int) -> int:
    """Return the delivery time of a message with a level ≥ 1. Levels after the last level have the delay of the last
    level."""
    return store_timestamp + delays[min(level, len(delays)) - 1]

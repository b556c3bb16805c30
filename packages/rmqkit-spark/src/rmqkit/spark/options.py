"""The options of the Spark formats: typed structs with case-insensitive names, and an error for every mistake.

Each format declares its options once, as a settings type (`rmqkit.settings`)::

    batch_rows: Annotated[int, Setting("batchRows", low=1, help="...")] = 8192

Spark passes options as texts with lower-cased names. Sizes may have a suffix: ``128m``.
"""

from __future__ import annotations

import difflib
import enum
import re
from collections.abc import Mapping
from typing import Annotated, TypeVar

import msgspec

from rmqkit.arrow.options import CorruptRecords, IncludeProperties, OffsetsFrom, VerifyCrc
from rmqkit.errors import SettingsError
from rmqkit.protocol.names import TOOLS_GROUP
from rmqkit.settings import Setting, load, setting_table
from rmqkit.store.log.scan import BATCH_ROWS


class Entity(enum.Enum):
    """The tables of a store, by the kind of their rows."""

    MESSAGES = "messages"
    CONSUME_QUEUE = "consumequeue"
    INDEX = "index"
    RAW = "commitlog-raw"
    TOPICS = "topics"
    OFFSETS = "offsets"
    DELAY = "delay"
    TRANSACTIONS = "transactions"


class StoreOptions(msgspec.Struct, frozen=True):
    """The options of ``spark.read.format("rocketmq-store")``."""

    path: Annotated[str, Setting("path", help="store directory of a broker (storePathRootDir), or its URL")] = ""
    log_paths: Annotated[
        str, Setting("storePathCommitLog", help="commit log directories, separated by commas, if not path/commitlog")
    ] = ""
    entity: Annotated[Entity, Setting("entity", help="kind of rows")] = Entity.MESSAGES
    topics: Annotated[str, Setting("topic", help="read only these topics, separated by commas")] = ""
    columns: Annotated[str, Setting("columns", help="read only these columns, separated by commas")] = ""
    include_body: Annotated[bool, Setting("includeBody", help="add a body column")] = True
    include_properties: Annotated[
        IncludeProperties,
        Setting("includeProperties", help="properties as a map, as the stored string, or no properties"),
    ] = IncludeProperties.MAP
    split_bytes: Annotated[int, Setting("splitBytes", low=1, help="bytes of a log file that one task reads")] = (
        128 << 20
    )
    batch_rows: Annotated[
        int, Setting("batchRows", low=1, high=1 << 20, help="number of records to decode at once")
    ] = BATCH_ROWS
    verify_crc: Annotated[VerifyCrc, Setting("verifyCrc", help="what to do with a wrong CRC")] = VerifyCrc.NONE
    corrupt_records: Annotated[CorruptRecords, Setting("corruptRecordMode", help="what to do with damaged records")] = (
        CorruptRecords.FAIL
    )
    decompress: Annotated[bool, Setting("decompress", help="true: decompressed bodies; false: bodies as stored")] = True
    unwrap: Annotated[
        bool, Setting("unwrap", help="true: one row per message of an inner batch; false: one row per record")
    ] = True
    broker_name: Annotated[str, Setting("brokerName", help="value of the brokerName column")] = ""
    offsets_from: Annotated[
        OffsetsFrom,
        Setting(
            "offsetsFrom",
            help="read the whole log (walk), or only the records that the consume queues of the topics point to",
        ),
    ] = OffsetsFrom.WALK
    keys: Annotated[
        str, Setting("key", help="only messages with one of these keys or unique keys; needs topic; uses the index")
    ] = ""
    lite_topics: Annotated[
        str, Setting("liteTopic", help="only messages of these lite topics, separated by commas")
    ] = ""
    lite_prefix: Annotated[str, Setting("liteTopicPrefix", help="only messages of lite topics with this prefix")] = ""
    index_slot_count: Annotated[
        int,
        Setting("maxHashSlotNum", low=1, help="number of hash slots in an index file, as configured for the broker"),
    ] = 5_000_000
    archive: Annotated[
        str,
        Setting(
            "archive",
            help="folder or URL of the broker's segments (its setting archive, and its name): read the messages of "
            "deleted log files from there",
        ),
    ] = ""
    queue_ids: Annotated[str, Setting("queueId", help="read only queues of these ids, separated by commas")] = ""
    starting_timestamp_ms: Annotated[
        int,
        Setting(
            "startingTimestamp", low=0, help="read only messages stored at or after this time, in ms since the epoch"
        ),
    ] = 0
    ending_timestamp_ms: Annotated[
        int,
        Setting(
            "endingTimestamp",
            low=0,
            help="read only messages stored before this time, in ms since the epoch; 0 means no limit",
        ),
    ] = 0

    @property
    def topic_names(self) -> list[str]:
        """The wanted topics; an empty list means all."""
        return words(self.topics)


class ByTimestamp(enum.Enum):
    """The treatment of a start time that is later than the last message of a queue."""

    ERROR = "error"
    LATEST = "latest"


class ByGroup(enum.Enum):
    """The start of a queue in which the consumer group of ``startingOffsets=group`` has no offset."""

    ERROR = "error"
    EARLIEST = "earliest"
    LATEST = "latest"


class ColumnNames(enum.Enum):
    """The names and types of the columns of messages."""

    ROCKETMQ = "rocketmq"
    KAFKA = "kafka"


class _Connected(msgspec.Struct, frozen=True):
    """Options of all formats that need brokers: addresses and credentials."""

    name_servers: Annotated[
        str, Setting("nameServer", help="host:port;host:port. Default: NAMESRV_ADDR, else 127.0.0.1:9876")
    ] = ""
    access_key: Annotated[str, Setting("accessKey", help="user name (access key) that signs every request")] = ""
    secret_key: Annotated[str, Setting("secretKey", help="the user's secret")] = ""
    namespace: Annotated[str, Setting("namespace", help="prefix of all topic and group names")] = ""
    use_tls: Annotated[bool, Setting("useTLS", help="encrypt connections")] = False
    trusted: Annotated[
        str, Setting("trustCertPath", help="CA certificates for server certificates, PEM; empty means no verification")
    ] = ""
    patience_ms: Annotated[
        int, Setting("brokerPatienceMs", low=0, help="how long a task retries a broker that does not answer, in ms")
    ] = 60_000

    def live_options(self, pull_count: int) -> LiveOptions:
        """Return the options of a reader that uses the same brokers and the same user."""
        return LiveOptions(
            **{name: getattr(self, name) for name in _Connected.__struct_fields__}, pull_count=pull_count
        )


class LiveOptions(_Connected, frozen=True):
    """The options of ``spark.read`` and ``spark.readStream.format("rocketmq")``."""

    topics: Annotated[str, Setting("subscribe", help="topics, separated by commas")] = ""
    topic: Annotated[str, Setting("topic", help="the same as subscribe")] = ""
    pattern: Annotated[str, Setting("subscribePattern", help="regular expression for the whole topic name")] = ""
    assigned: Annotated[str, Setting("assign", help='queues: {"topic":{"broker-a":[0,1]}}')] = ""
    expression: Annotated[str, Setting("subExpression", help="tags (A || B) or an SQL92 expression")] = "*"
    expression_type: Annotated[str, Setting("subExpressionType", help="TAG or SQL92")] = "TAG"
    lite_topics: Annotated[
        str,
        Setting(
            "liteTopic",
            help="only messages of these lite topics, separated by commas; a batch reads only their light queues",
        ),
    ] = ""
    lite_prefix: Annotated[str, Setting("liteTopicPrefix", help="only messages of lite topics with this prefix")] = ""
    group: Annotated[
        str, Setting("group", help="consumer group for the requests; startingOffsets=group begins at its offsets")
    ] = TOOLS_GROUP
    commit_group: Annotated[
        str,
        Setting(
            "commitOffsetsToGroup",
            help="save the progress of the stream as offsets of this group, for tools that show lag",
        ),
    ] = ""
    starting_offsets: Annotated[
        str,
        Setting(
            "startingOffsets",
            help="earliest, latest, group or JSON (-2, -1); the default is latest for streams, earliest for batches;"
            " group begins at the offsets that the consumer group has committed, and does not change them",
        ),
    ] = ""
    ending_offsets: Annotated[str, Setting("endingOffsets", help="latest or JSON (-1); batch only")] = "latest"
    starting_timestamp_ms: Annotated[int, Setting("startingTimestamp", low=0, help="ms since the epoch")] = 0
    ending_timestamp_ms: Annotated[int, Setting("endingTimestamp", low=0, help="ms since the epoch; batch only")] = 0
    starting_timestamps: Annotated[
        str, Setting("startingOffsetsByTimestamp", help="ms since the epoch, as JSON by topic, broker and queue")
    ] = ""
    ending_timestamps: Annotated[
        str, Setting("endingOffsetsByTimestamp", help="ms since the epoch, as JSON by topic, broker and queue")
    ] = ""
    by_timestamp: Annotated[
        ByTimestamp,
        Setting(
            "startingOffsetsByTimestampStrategy",
            help="what to do if there is no message at or after the start time: error or latest",
        ),
    ] = ByTimestamp.ERROR
    by_group: Annotated[
        ByGroup,
        Setting(
            "startingOffsetsByGroupStrategy",
            help="where startingOffsets=group begins a queue without an offset of the group: earliest or latest; error:"
            " fail if the group has no offset at all, otherwise earliest",
        ),
    ] = ByGroup.ERROR
    fail_on_data_loss: Annotated[
        bool,
        Setting(
            "failOnDataLoss",
            help="true: fail when messages were deleted before they were read; false: log it and continue",
        ),
    ] = True
    offsets_max: Annotated[
        int, Setting("maxOffsetsPerTrigger", low=0, help="maximum number of messages per batch; 0 means no limit")
    ] = 0
    offsets_min: Annotated[
        int,
        Setting(
            "minOffsetsPerTrigger",
            low=0,
            help="wait with a batch for this many messages, or until maxTriggerDelay has passed; 0 means do not wait",
        ),
    ] = 0
    trigger_delay: Annotated[
        str,
        Setting(
            "maxTriggerDelay",
            help="longest time from one batch to the next while there are messages, such as 30s, 15m or 1h; without a"
            " unit in ms; only with minOffsetsPerTrigger",
        ),
    ] = "15m"
    bytes_max: Annotated[
        int,
        Setting(
            "maxBytesPerTrigger",
            low=0,
            help="maximum bytes per batch, estimated by the mean size in each queue; 0 means no limit",
        ),
    ] = 0
    partitions_min: Annotated[
        int, Setting("minPartitions", low=0, help="minimum number of tasks per batch; 0 means one per queue")
    ] = 0
    records_max: Annotated[
        int, Setting("maxRecordsPerPartition", low=0, help="maximum number of messages per task; 0 means no limit")
    ] = 0
    pull_count: Annotated[int, Setting("pullBatchSize", low=1, high=1024, help="number of messages per pull")] = 32
    pull_timeout_ms: Annotated[int, Setting("pullTimeoutMs", low=1, help="timeout of a pull, in ms")] = 10_000
    columns: Annotated[str, Setting("columns", help="read only these columns, separated by commas")] = ""
    column_names: Annotated[
        ColumnNames,
        Setting(
            "columnNames",
            help="kafka: key, value, topic, partition, offset, timestamp, timestampType and headers, as in Spark's"
            " Kafka source; option columns may add columns of RocketMQ",
        ),
    ] = ColumnNames.ROCKETMQ
    include_properties: Annotated[
        IncludeProperties,
        Setting("includeProperties", help="properties as a map, as the stored string, or no properties"),
    ] = IncludeProperties.MAP
    decompress: Annotated[bool, Setting("decompress", help="true: decompressed bodies; false: bodies as stored")] = True
    unwrap: Annotated[
        bool, Setting("unwrap", help="true: one row per message of an inner batch; false: one row per record")
    ] = True
    batch_rows: Annotated[
        int, Setting("batchRows", low=1, high=1 << 20, help="number of records to decode at once")
    ] = BATCH_ROWS

    @property
    def trigger_delay_ms(self) -> int:
        """``maxTriggerDelay`` in ms. Raises SettingsError: it is not a time."""
        return _duration_ms("maxTriggerDelay", self.trigger_delay)


class DeliveryGuarantee(enum.Enum):
    """The delivery guarantee of the sink for a row."""

    AT_LEAST_ONCE = "at-least-once"
    TRANSACTIONAL = "transactional"


class ReservedProperties(enum.Enum):
    """The treatment of row properties whose names RocketMQ reserves."""

    FAIL = "fail"
    DROP = "drop"


class SinkOptions(_Connected, frozen=True):
    """The options of ``write`` and ``writeStream.format("rocketmq")``."""

    topic: Annotated[str, Setting("topic", help="topic for all rows; without it, each row needs a topic column")] = ""
    guarantee: Annotated[
        DeliveryGuarantee,
        Setting("deliveryGuarantee", help="at-least-once, or transactional (each row exactly once, by half messages)"),
    ] = DeliveryGuarantee.AT_LEAST_ONCE
    group: Annotated[
        str, Setting("producerGroup", help="producer group; its ledger is the topic rmqkit-ledger-<producerGroup>")
    ] = "rmqkit-spark"
    sink_id: Annotated[
        str,
        Setting(
            "sinkId",
            help="first part of the key of each row; default: the id of the stream, or a new id for each batch",
        ),
    ] = ""
    batch_id: Annotated[
        int,
        Setting("batchId", low=0, help="second part of the key of each row, such as the batch number of foreachBatch"),
    ] = 0
    rows_per_s: Annotated[
        int,
        Setting(
            "maxRowsPerSecond", low=0, help="maximum rows per second of each task, and of the commit; 0 means no limit"
        ),
    ] = 0
    send_timeout_ms: Annotated[int, Setting("sendTimeoutMs", low=1, help="timeout of one try of a send, in ms")] = 3000
    settle_ms: Annotated[
        int,
        Setting(
            "transactionSettleMs",
            low=1,
            help="ms after which an END_TRANSACTION took effect or never will; above waitTimeMillsInTransactionQueue",
        ),
    ] = 5000
    fail_on_ledger_loss: Annotated[
        bool,
        Setting("failOnLedgerLoss", help="true: fail when the ledger entries of the query are gone; false: continue"),
    ] = True
    reserved_properties: Annotated[
        ReservedProperties,
        Setting(
            "reservedProperties",
            help="properties of a row with names that RocketMQ reserves, such as KEYS or DELAY: fail, or drop them",
        ),
    ] = ReservedProperties.FAIL
    column_names: Annotated[
        ColumnNames,
        Setting(
            "columnNames",
            help="kafka: rows have the columns value, key, headers, topic and partition of Spark's Kafka sink",
        ),
    ] = ColumnNames.ROCKETMQ
    sends_max: Annotated[
        int, Setting("backPressureForAsyncSendNum", low=10, help="maximum number of concurrent requests per task")
    ] = 256
    batch_bytes: Annotated[
        int, Setting("batchMaxBytes", low=1, high=2 << 20, help="maximum bytes of a request with several rows")
    ] = 256 << 10
    compress_body_bytes: Annotated[
        int, Setting("compressMsgBodyOverHowmuch", low=1, help="compress bodies of at least this size, in bytes")
    ] = 4096


OptionsType = TypeVar("OptionsType", bound=msgspec.Struct)

_KAFKA_NAMES = {
    "kafka.bootstrap.servers": "nameServer",
    "kafka.group.id": "group",
    "groupidprefix": "group",
    "includeheaders": "includeProperties",
    "kafkaconsumer.polltimeoutms": "pullTimeoutMs",
    "fetchoffset.numretries": "brokerPatienceMs",
    "fetchoffset.retryintervalms": "brokerPatienceMs",
    "kafka.max.poll.records": "pullBatchSize",
    "kafka.request.timeout.ms": "sendTimeoutMs",
    "kafka.delivery.timeout.ms": "brokerPatienceMs",
    "kafka.batch.size": "batchMaxBytes",
    "kafka.max.in.flight.requests.per.connection": "backPressureForAsyncSendNum",
    "kafka.compression.type": "compressMsgBodyOverHowmuch",
    "kafka.security.protocol": "useTLS",
    "kafka.ssl.truststore.location": "trustCertPath",
    "kafka.sasl.jaas.config": "accessKey",
    "kafka.sasl.mechanism": "accessKey",
}
"""Options of Spark's Kafka connector, lower-cased, and their names here."""
_KAFKA_WITHOUT = {
    "kafka.isolation.level": "uncommitted messages are never read",
    "kafka.transactional.id": "deliveryGuarantee=transactional needs only producerGroup",
    "kafka.acks": "the broker's flushDiskType and brokerRole decide when a send is done",
    "kafka.enable.idempotence": "deliveryGuarantee=transactional sends each row once",
    "kafka.auto.offset.reset": "startingOffsets and startingOffsetsByGroupStrategy decide where a query begins",
}
"""Kafka options without an equivalent here, and the reason why they can be left out."""
_SIZE = re.compile(r"(\d+)\s*([kmg])b?", re.IGNORECASE)
_SHIFTS = {"k": 10, "m": 20, "g": 30}
_DURATION = re.compile(r"(\d+)\s*([a-z]*)", re.IGNORECASE)
_UNIT_MS = {"ms": 1, "": 1, "s": 1000, "m": 60_000, "min": 60_000, "h": 3_600_000, "d": 86_400_000}


def parse_options(options_type: type[OptionsType], given: Mapping[str, str], source: str) -> OptionsType:
    """Parse the options of the format ``source``; ``given`` maps names in any case to texts.
    Raises SettingsError: an option is unknown (the text suggests a similar one), or a value is not valid."""
    table = setting_table(options_type)
    spelled = {name.lower(): name for name in table}
    texts: dict[str, str] = {}
    for key, text in given.items():
        name = spelled.get(key.lower())
        if name is None:
            raise SettingsError(f"{source}: option {key!r} is not known: {_hint(key.lower(), spelled)}")
        texts[name] = _normalised(str(text).strip(), table[name][1])
    options: OptionsType = load([options_type], texts, source=source).values[0]
    return options


def _hint(key: str, spelled: Mapping[str, str]) -> str:
    """Return a hint for an unknown option. ``spelled`` maps lower-cased names to the known options."""
    if key in _KAFKA_WITHOUT:
        return f"it is Kafka's, leave it out: {_KAFKA_WITHOUT[key]}"
    if (ours := _KAFKA_NAMES.get(key, "")).lower() in spelled:
        return f"it is Kafka's, its name here is {ours}"
    near = difflib.get_close_matches(key, spelled, n=1)
    return f"did you mean {spelled[near[0]]}?" if near else f"choose from {', '.join(spelled.values())}"


def words(text: str) -> list[str]:
    """Split a comma-separated list."""
    return [word.strip() for word in text.split(",") if word.strip()]


def _duration_ms(name: str, text: str) -> int:
    found = _DURATION.fullmatch(text)
    unit_ms = None if found is None else _UNIT_MS.get(found[2].lower())
    if found is None or unit_ms is None:
        units = ", ".join(filter(None, _UNIT_MS))
        raise SettingsError(f"{name}={text} must be a whole number with one of the units {units}, such as 15m")
    return int(found[1]) * unit_ms


def _normalised(text: str, value_type: object) -> str:
    # Spark passes every option as text: a size may have a suffix, and names of enums may be in any case.
    if value_type is int and (size := _SIZE.fullmatch(text)):
        return str(int(size[1]) << _SHIFTS[size[2].lower()])
    return text.lower() if isinstance(value_type, type) and issubclass(value_type, enum.Enum) else text

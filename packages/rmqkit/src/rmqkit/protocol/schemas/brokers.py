"""Brokers: requests for registration and membership (103, 104, 322, 901, 904, 905) and configuration (26), and requests
of slaves and tools to a master: HA state (906 to 908), delay offsets (45) and timer state (60, 61).

A registration (REGISTER_BROKER) has three forms:

=====================  =============================================================================================
form                   sender
=====================  =============================================================================================
`TopicConfigTable`     brokers before 3.0.11 (`SINCE_REGISTER_BODY`): JSON, only the topic table
`RegisterBrokerBody`   all later brokers: JSON
compressed             with ``compressedRegister``: a zlib stream (RFC 1950) of these parts, lengths big-endian:

  i32 n, data version JSON
  i32 count, then per topic: i32 n, ``<name> <read queues> <write queues> <perm> <filter type>[ <attributes JSON>]``
  i32 n, filter server list JSON
  i32 count, then per static topic: i32 n, `TopicQueueMappingInfo` JSON       (only from 5.0.0 on, `SINCE_MAPPINGS`)
=====================  =============================================================================================

The compressed form lacks ``topicSysFlag`` and ``order``, and in 4.x the attributes. A flag in the header marks a
compressed body. Some 5.3 brokers compress without this flag, so the decoder tries zlib if a body is not JSON.

The block of GET_TIMER_CHECK_POINT:

======  ====  ==================================================================
offset  size  field (big-endian)
======  ====  ==================================================================
0          8  lastReadTimeMs
8          8  lastTimerLogFlushPos
16         8  lastTimerQueueOffset
24         8  masterTimerQueueOffset
32         8  data version: stateVersion
40         8  data version: timestamp
48         8  data version: counter
======  ====  ==================================================================

`rmqkit.protocol.ha` defines the connection that copies the log.
Source: remoting.md §4.2, §4.4, §6.4.1, §6.4.7, §6.4.13.
"""

from __future__ import annotations

import struct
import zlib
from typing import TypeVar

import msgspec
from msgspec import UNSET, Struct, UnsetType, field

from rmqkit.errors import BodyError
from rmqkit.protocol import fastjson
from rmqkit.protocol.codes import Int32, Int64, version_number
from rmqkit.protocol.codes import RequestCode as Code
from rmqkit.protocol.command import FRAME_BYTES_MAX
from rmqkit.protocol.compression import Compression, decompress
from rmqkit.protocol.operation import BROKER, NAME_SERVER, Content, Operation, Right, Server
from rmqkit.protocol.record import COMPRESSED
from rmqkit.protocol.schemas.topics import DataVersion, KVTable, TopicConfig, TopicConfigTable, TopicQueueMappingInfo


class BrokerIdentity(Struct, rename="camel", gc=False):
    """UNREGISTER_BROKER and QUERY_DATA_VERSION, with the identity of a broker. Id 0 is the master."""

    broker_name: str
    broker_addr: str
    cluster_name: str
    broker_id: Int64


class RegisterBrokerRequest(BrokerIdentity, gc=False):
    """REGISTER_BROKER.

    Attributes:
        heartbeat_timeout_millis: maximum time between heartbeats of the broker; 120 s if missing.
        enable_acting_master: None from brokers before 5.0, which has another meaning than False.
        compressed: True if the body is in the compressed form.
        body_crc32: CRC-32 of the body as sent, with the top bit cleared. 0 or a missing field means no check.
        zone_name: zone of the broker, for clients that request the route of one zone.
    """

    ha_server_addr: str | None = None
    heartbeat_timeout_millis: Int64 | None = None
    enable_acting_master: bool | None = None
    compressed: bool = False
    body_crc32: Int32 = 0
    zone_name: str | None = field(default=None, name="__ZONE_NAME")


class RegisterBrokerResponse(Struct, rename="camel", gc=False):
    """Response to REGISTER_BROKER. The fields are set for a slave with a known master."""

    ha_server_addr: str | None = None
    master_addr: str | None = None


class DataVersionResponse(Struct, gc=False):
    """Response to QUERY_DATA_VERSION."""

    changed: bool


class BrokerHeartbeat(Struct, rename="camel", gc=False):
    """BROKER_HEARTBEAT to a name server."""

    cluster_name: str
    broker_addr: str
    broker_name: str


class BrokerMemberGroupRequest(Struct, rename="camel", gc=False):
    """GET_BROKER_MEMBER_GROUP."""

    cluster_name: str
    broker_name: str


class MinBrokerIdChange(Struct, rename="camel", gc=False):
    """NOTIFY_MIN_BROKER_ID_CHANGE. ``offline_broker_addr`` is missing if a broker joined."""

    min_broker_id: Int64
    broker_name: str
    min_broker_addr: str
    offline_broker_addr: str | None = None
    ha_broker_addr: str | None = None


class BrokerConfigResponse(Struct, gc=False):
    """Response to GET_BROKER_CONFIG. ``version`` is a DataVersion as JSON."""

    version: str | None = None


class RegisterBrokerBody(Struct, rename="camel"):
    """Body of REGISTER_BROKER. If the filter server list is null, the name server keeps its list."""

    filter_server_list: list[str] | None = field(default_factory=list)
    topic_config_serialize_wrapper: TopicConfigTable = field(default_factory=TopicConfigTable)


T = TypeVar("T")

SINCE_REGISTER_BODY = 37
"""Version number of 3.0.11."""

SINCE_MAPPINGS = version_number(5, 0, 0)

_I32 = struct.Struct(">i")
_LEVEL = 9
_ZLIB = COMPRESSED | Compression.ZLIB
_LINE_PARTS = (5, 6)
_SURELY_FEW_BYTES = 1 << 20
_OBJECTS_MAX = 200_000
"""The limit of objects. A topic has two objects and 160 bytes, so only an attack has more objects in a frame."""
_DIALECT_BYTES_MAX = 4 << 20
"""The maximum size of a registration in the dialect, about 20,000 topics. Brokers with static topics use the
dialect."""


class BrokerMemberGroup(Struct, rename="camel"):
    """The brokers of one name, as id → address."""

    broker_addrs: dict[int, str]
    broker_name: str
    cluster: str


class BrokerMemberGroupBody(Struct, rename="camel"):
    """Response to GET_BROKER_MEMBER_GROUP."""

    broker_member_group: BrokerMemberGroup


def decode_registration(body: bytes, *, is_compressed: bool, version: int) -> RegisterBrokerBody:
    """Return the registration in a body. An empty body means an empty table with a zero data version.
    ``is_compressed``: the flag in the header. Without the flag, a body that is not JSON is tried as compressed.
    ``version``: the protocol version of the broker.
    Raises BodyError: the body has none of the forms."""
    if not body:
        return RegisterBrokerBody()
    if version < SINCE_REGISTER_BODY:
        return RegisterBrokerBody(topic_config_serialize_wrapper=_decode(body, TopicConfigTable))
    if is_compressed:
        return _decode_compressed(body, version)
    try:
        return _decode(body, RegisterBrokerBody)
    except BodyError as not_json:
        try:
            return _decode_compressed(body, version)
        except BodyError:
            raise not_json from None


def _decode(body: bytes, body_type: type[T]) -> T:
    objects = body.count(b"{") if len(body) > _SURELY_FEW_BYTES else 0
    if objects > _OBJECTS_MAX:
        raise BodyError(f"registration of {len(body)} bytes with {objects} objects: {_OBJECTS_MAX} are read")
    return fastjson.decode_as(body, body_type, slow_bytes_max=_DIALECT_BYTES_MAX)


def compress_registration(registration: RegisterBrokerBody, *, version: int) -> bytes:
    """Return the compressed form for a broker of this version."""
    table = registration.topic_config_serialize_wrapper
    lines = [_topic_line(name, config, version) for name, config in table.topic_config_table.items()]
    parts = [_with_length(msgspec.json.encode(table.data_version)), _I32.pack(len(lines)), *map(_with_length, lines)]
    parts.append(_with_length(msgspec.json.encode(registration.filter_server_list or [])))
    # A name server decodes by the version in the command, which must be equal to ``version``.
    if version >= SINCE_MAPPINGS:
        mappings = list((table.topic_queue_mapping_info_map or {}).values())
        parts.append(_I32.pack(len(mappings)))
        parts.extend(_with_length(fastjson.dumps(mapping)) for mapping in mappings)
    return zlib.compress(b"".join(parts), _LEVEL)


def _decode_compressed(body: bytes, version: int) -> RegisterBrokerBody:
    parts = _Parts(decompress(body, _ZLIB, bytes_max=FRAME_BYTES_MAX))
    table = TopicConfigTable(fastjson.decode_as(parts.take("data version"), DataVersion))
    for _ in range(parts.count("topics")):
        config = _topic_of(parts.take("topic"))
        table.topic_config_table[config.topic_name] = config
    filter_servers = fastjson.decode_as(parts.take("filter servers"), list[str])
    if version >= SINCE_MAPPINGS:
        mappings = [
            fastjson.decode_as(parts.take("mapping"), TopicQueueMappingInfo) for _ in range(parts.count("mappings"))
        ]
        table.topic_queue_mapping_info_map = {mapping.topic: mapping for mapping in mappings}
    return RegisterBrokerBody(filter_servers, table)


class _Parts:
    """A reader of parts, each of which has its length in front."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self._at = 0

    def count(self, what: str) -> int:
        """Return the next number, a count or a size. Each counted item has at least one byte.
        Raises BodyError: the number is greater than the number of remaining bytes."""
        end = self._at + _I32.size
        if end > len(self._content):
            raise BodyError(f"compressed registration ends at byte {len(self._content)} before its {what}")
        number: int = _I32.unpack_from(self._content, self._at)[0]
        if not 0 <= number <= len(self._content) - end:
            raise BodyError(f"compressed registration: {number} at byte {self._at} cannot be the size of its {what}")
        self._at = end
        return number

    def take(self, what: str) -> bytes:
        size = self.count(what)
        taken = self._content[self._at : self._at + size]
        self._at += size
        return taken


def _topic_line(name: str, config: TopicConfig, version: int) -> bytes:
    line = f"{name} {config.read_queue_nums} {config.write_queue_nums} {config.perm} {config.topic_filter_type}"
    if version < SINCE_MAPPINGS:
        return line.encode()
    return f"{line} ".encode() + msgspec.json.encode(config.attributes or {})


def _topic_of(line: bytes) -> TopicConfig:
    try:
        # Limit the number of splits: the last part is the JSON of the attributes, which may contain blanks.
        parts = line.decode().split(" ", _LINE_PARTS[-1] - 1)
        if len(parts) not in _LINE_PARTS:
            raise ValueError(f"it has {len(parts)} items")
        config = TopicConfig(parts[0], int(parts[1]), int(parts[2]), int(parts[3]), parts[4])
    except ValueError as error:
        raise BodyError(f"compressed registration: topic line {line[:80]!r} cannot be read: {error}") from None
    if len(parts) == _LINE_PARTS[-1]:
        config.attributes = fastjson.decode_as(parts[5].encode(), dict[str, str])
    return config


def _with_length(content: bytes) -> bytes:
    return _I32.pack(len(content)) + content


class HaInfo(Struct, rename="camel", gc=False):
    """The header of requests and responses of EXCHANGE_BROKER_HA_INFO.

    An empty request is a query. Other requests set the master of a slave.
    """

    master_ha_address: str | None = None
    master_flush_offset: Int64 | None = None
    master_address: str | None = None


class MasterFlushOffsetRequest(Struct, rename="camel", gc=False):
    """RESET_MASTER_FLUSH_OFFSET."""

    master_flush_offset: Int64


class HaClientInfo(Struct, rename="camel", kw_only=True):
    """The state of a slave's connection to its master. Times are in ms; offsets are positions in the log, in bytes."""

    master_addr: str | None = None
    transferred_byte_in_second: Int64 = 0
    max_offset: Int64 = 0
    last_read_timestamp: Int64 = 0
    last_write_timestamp: Int64 = 0
    master_flush_offset: Int64 = 0


class HaConnectionInfo(Struct, rename="camel", kw_only=True):
    """The state of a slave, as its master reports it.
    ``diff``: the lag of the slave in bytes. ``lag_ms``: the age of the oldest data that the slave has not acknowledged.
    Only rmqkit's masters send ``lag_ms``, if the age is known. Java's tools ignore it."""

    addr: str
    slave_ack_offset: Int64 = 0
    diff: Int64 = 0
    in_sync: bool = False
    transferred_byte_in_second: Int64 = 0
    transfer_from_where: Int64 = 0
    lag_ms: Int64 | UnsetType = UNSET


class HaRuntimeInfo(Struct, rename="camel", kw_only=True):
    """Response to GET_BROKER_HA_STATUS. A slave sets only ``ha_client_runtime_info``."""

    master: bool = False
    master_commit_log_max_offset: Int64 = 0
    in_sync_slave_nums: Int32 = 0
    ha_connection_info: list[HaConnectionInfo] = field(default_factory=list)
    ha_client_runtime_info: HaClientInfo = field(default_factory=HaClientInfo)


class DelayOffsets(Struct, rename="camel"):
    """Response to GET_ALL_DELAY_OFFSET: delay level → offset. 4.x sends only the table."""

    data_version: DataVersion | UnsetType = UNSET
    offset_table: dict[Int32, Int64] = field(default_factory=dict)


_BLOCK = struct.Struct(">7q")
TIMER_CHECKPOINT_BYTES = _BLOCK.size


class TimerCheckpoint(Struct, kw_only=True):
    """The progress of the timer: a time in ms, a position in the timer log in bytes, and offsets in the timer queue."""

    last_read_time_ms: int = 0
    last_timer_log_flush_position: int = 0
    last_timer_queue_offset: int = 0
    master_timer_queue_offset: int = 0
    data_version: DataVersion = field(default_factory=DataVersion)


def encode_timer_checkpoint(checkpoint: TimerCheckpoint) -> bytes:
    version = checkpoint.data_version
    return _BLOCK.pack(
        checkpoint.last_read_time_ms,
        checkpoint.last_timer_log_flush_position,
        checkpoint.last_timer_queue_offset,
        checkpoint.master_timer_queue_offset,
        version.state_version,
        version.timestamp,
        version.counter,
    )


def decode_timer_checkpoint(body: bytes | bytearray | memoryview) -> TimerCheckpoint:
    """Return the checkpoint in a body. Raises BodyError: the body does not have 56 bytes."""
    if len(body) != _BLOCK.size:
        raise BodyError(f"timer checkpoint has {len(body)} bytes: it must have {_BLOCK.size}")
    read_ms, flushed, queue_offset, master_offset, state_version, timestamp, counter = _BLOCK.unpack(body)
    return TimerCheckpoint(
        last_read_time_ms=read_ms,
        last_timer_log_flush_position=flushed,
        last_timer_queue_offset=queue_offset,
        master_timer_queue_offset=master_offset,
        data_version=DataVersion(counter, state_version, timestamp),
    )


class TimingCount(Struct, rename="camel", gc=False):
    """The number of waiting timer messages of a topic. ``time_stamp`` is the time of the last change in ms."""

    count: Int64 = 0
    time_stamp: Int64 = 0


class TimerMetricsRequest(Struct, rename="camel", gc=False):
    """GET_TIMER_METRICS. ``due_within`` is specific to rmqkit. Slaves do not set it, and Apache's brokers ignore it."""

    due_within: bool = False


class TimerMetrics(Struct, rename="camel"):
    """Response to GET_TIMER_METRICS: topic → waiting messages.
    ``due_within_s``, specific to rmqkit, is sent if the request sets ``due_within``. It maps a number of seconds to the
    number of messages that are due within this time, without the messages of the smaller numbers of seconds."""

    data_version: DataVersion = field(default_factory=DataVersion)
    timing_count: dict[str, TimingCount] = field(default_factory=dict)
    due_within_s: dict[Int32, Int64] | UnsetType = UNSET


def bytes_text(count: int) -> str:
    """Return a number of bytes as readable text, in the largest unit with a value of at least 1: ``0 B``, ``1.5 KiB``,
    ``252.0 GiB``."""
    if count < 1024:
        return f"{count} B"
    exponent = min(6, (count.bit_length() - 1) // 10)
    return f"{count / 1024**exponent:.1f} {'KMGTPE'[exponent - 1]}iB"


# fmt: off
OPERATIONS = (
    Operation(Code.UPDATE_BROKER_CONFIG, 2, BROKER, request_body=Content.SETTINGS),
    Operation(Code.GET_BROKER_CONFIG, 2, BROKER, None, BrokerConfigResponse, response_body=Content.SETTINGS,
              is_reading=True),
    Operation(Code.GET_BROKER_RUNTIME_INFO, 2, BROKER, response_body=KVTable, is_reading=True),
    Operation(Code.GET_ALL_DELAY_OFFSET, 2, BROKER, response_body=DelayOffsets, is_reading=True),
    Operation(Code.GET_TIMER_CHECK_POINT, 2, BROKER, response_body=Content.TIMER_CHECKPOINT, is_reading=True),
    Operation(Code.GET_TIMER_METRICS, 2, BROKER, TimerMetricsRequest, response_body=TimerMetrics, is_reading=True),
    Operation(Code.REGISTER_BROKER, 1, NAME_SERVER, RegisterBrokerRequest, RegisterBrokerResponse,
              request_body=RegisterBrokerBody, response_body=KVTable),
    Operation(Code.UNREGISTER_BROKER, 1, NAME_SERVER, BrokerIdentity),
    Operation(Code.CLEAN_EXPIRED_CONSUMEQUEUE, 2, BROKER),
    Operation(Code.CLEAN_UNUSED_TOPIC, 2, BROKER),
    Operation(Code.UPDATE_NAMESRV_CONFIG, 2, NAME_SERVER, request_body=Content.SETTINGS),
    Operation(Code.GET_NAMESRV_CONFIG, 2, NAME_SERVER, response_body=Content.SETTINGS, is_reading=True),
    Operation(Code.QUERY_DATA_VERSION, 1, NAME_SERVER, BrokerIdentity, DataVersionResponse, request_body=DataVersion,
              response_body=DataVersion),
    Operation(Code.DELETE_EXPIRED_COMMITLOG, 2, BROKER),
    Operation(Code.GET_BROKER_MEMBER_GROUP, 2, NAME_SERVER, BrokerMemberGroupRequest,
              response_body=BrokerMemberGroupBody, is_reading=True),
    Operation(Code.BROKER_HEARTBEAT, 2, (Server.NAME_SERVER, Server.CONTROLLER), BrokerHeartbeat),
    Operation(Code.NOTIFY_MIN_BROKER_ID_CHANGE, 2, BROKER, MinBrokerIdChange, right=Right("Update")),
    Operation(Code.EXCHANGE_BROKER_HA_INFO, 2, BROKER, HaInfo, HaInfo, right=Right("Update")),
    Operation(Code.GET_BROKER_HA_STATUS, 2, BROKER, response_body=HaRuntimeInfo, is_reading=True),
    Operation(Code.RESET_MASTER_FLUSH_OFFSET, 2, BROKER, MasterFlushOffsetRequest, right=Right("Update")),
)
# fmt: on

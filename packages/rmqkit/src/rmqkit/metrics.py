"""The metrics of broker, name server and proxy, as one table: name, kind, labels, unit, buckets and meaning.

Metrics with names that begin with ``rocketmq_`` have the labels, units and buckets of the reference (Apache 5.4.0 with
``metricsExporterType=PROM``). Metrics with names that begin with ``rmqkit_`` are specific to rmqkit. In the exposition
the name ends with the unit, as from OpenTelemetry's exporter: ``rocketmq_rpc_latency_milliseconds``. Every sample also
has the labels of `COMMON`. Source: behaviour.md §9.10.

The code that counts a value uses a key that it already has. The texts of labels are made only when the values are read.
One thread writes a value, and any thread can read it.
"""

from __future__ import annotations

import enum
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from operator import mul
from typing import Annotated

from msgspec import Struct

from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.settings import Setting


class Kind(enum.Enum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Server(enum.Flag):
    """The servers that can have a metric."""

    BROKER = enum.auto()
    NAME_SERVER = enum.auto()
    PROXY = enum.auto()
    BOTH = BROKER | NAME_SERVER
    ALL = BOTH | PROXY


class Metric(Struct, frozen=True):
    """A metric. ``absent``: the reason why no server has this metric, or empty. ``buckets``: the upper bounds of the
    buckets, without infinity."""

    name: str
    kind: Kind
    unit: str
    labels: tuple[str, ...]
    help: str
    servers: Server
    absent: str
    buckets: tuple[float, ...]

    @property
    def exposed_name(self) -> str:
        """The name of the metric in the exposition."""
        return f"{self.name}_{self.unit}" if self.unit else self.name


COMMON = {
    "cluster": "the broker's cluster; others have none",
    "node_type": "`broker`, `nameserver` or `proxy`",
    "node_id": "the broker's name; the name server's or the proxy's address",
}
"""The labels of every sample. The labels of ``metricsLabel`` follow them."""

_SHORT_MS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 1000.0, 5000.0)
_CREATION_MS = (10.0, 100.0, 1000.0, 3000.0, 5000.0)
_BUCKETS = {
    "rocketmq_rpc_latency": (1.0, 3.0, 5.0, 7.0, 10.0, 100.0, 1000.0, 2000.0, 3000.0),
    "rocketmq_topic_create_execution_time": _CREATION_MS,
    "rocketmq_consumer_group_create_execution_time": _CREATION_MS,
    "rocketmq_finish_message_latency": (5.0, 60.0, 600.0, 3600.0, 43200.0, 86400.0),
    "rocketmq_message_size": (1024.0, 4096.0, 524288.0, 1048576.0, 2097152.0, 4194304.0),
    "rocketmq_pop_buffer_scan_time_consume": (1.0, 10.0, 100.0, 1000.0, 2000.0, 3000.0),
    "rocketmq_delay_message_latency": (60.0, 600.0, 3600.0, 43200.0, 86400.0, 259200.0),
    "rmqkit_event_loop_lag": _SHORT_MS,
    "rmqkit_flush_latency": _SHORT_MS,
    "rmqkit_dispatch_latency": _SHORT_MS,
}

# The format of a line: kind, name, unit ("-" for none), labels, colon, meaning.
_BROKER = """
gauge rocketmq_processor_watermark - processor: waiting requests, by handler
gauge rocketmq_broker_permission -: brokerPermission: 4 is read, 2 is write, 6 is both
gauge rocketmq_topic_number -: number of topics
gauge rocketmq_lmq_number -: number of light queues (`enableLmq`) and lite topics
gauge rocketmq_consumer_group_number -: number of consumer groups
counter rocketmq_messages_in_total - topic message_type is_system: messages stored for producers; delayed messages \
count again when they are delivered
counter rocketmq_throughput_in_total - topic message_type is_system: bytes of the records of these messages
histogram rocketmq_message_size - topic message_type is_system: size of a record in bytes; a batch counts once, with \
the mean size
counter rocketmq_messages_out_total - topic consumer_group is_system: messages delivered to groups, without retries
counter rocketmq_throughput_out_total - topic consumer_group is_system: bytes of the records of these messages
histogram rocketmq_topic_create_execution_time milliseconds invocation_status is_system: time of requests to create a \
topic
histogram rocketmq_consumer_group_create_execution_time milliseconds invocation_status: time of requests to create a \
group
gauge rocketmq_producer_connections - language version protocol_type: connected producers, by client and group
gauge rocketmq_consumer_connections - consumer_group language version consume_mode protocol_type is_system: connected \
consumers
gauge rocketmq_consumer_lag_messages - topic consumer_group is_retry is_system: messages that a connected group has \
not consumed, including messages that a filter will skip; with `liteLagCountMetricsEnable` also of lite groups, over \
all lite topics of the parent
gauge rocketmq_consumer_inflight_messages - topic consumer_group is_retry is_system: messages that the group has \
pulled but not consumed
gauge rocketmq_consumer_ready_messages - topic consumer_group is_retry is_system: messages that the group has not \
pulled
gauge rocketmq_consumer_lag_latency milliseconds topic consumer_group is_retry is_system: age of the oldest message \
that a connected group has not consumed
gauge rocketmq_consumer_queueing_latency milliseconds topic consumer_group is_retry is_system: age of the oldest \
message that the group has not pulled
counter rocketmq_send_to_dlq_messages_total - topic consumer_group is_system: messages that went to the dead letters
counter rocketmq_commit_messages_total - topic: half messages committed
counter rocketmq_rollback_messages_total - topic: half messages rolled back
histogram rocketmq_finish_message_latency milliseconds topic: age of half messages when they are committed, in \
SECONDS (in spite of the name)
gauge rocketmq_half_messages - topic: half messages without a decision, since the start of the broker
gauge rocketmq_storage_size bytes storage_type storage_medium: used bytes of the file system of the store
gauge rocketmq_storage_flush_behind bytes storage_type storage_medium: bytes of the log that are not on the disk
gauge rocketmq_storage_dispatch_behind bytes storage_type storage_medium: bytes of the log that are not in the queues
gauge rocketmq_storage_message_reserve_time milliseconds storage_type storage_medium: age of the oldest message
histogram rmqkit_flush_latency milliseconds: time of a flush of the log (fdatasync)
histogram rmqkit_dispatch_latency milliseconds: time from the storeTimestamp of messages until they are readable
gauge rmqkit_replication_lag bytes slave: bytes of the log that a slave has not acknowledged
gauge rmqkit_replication_in_sync - slave: 1 if a slave is in sync, otherwise 0
gauge rmqkit_lite_topics - topic: lite topics of a parent topic
counter rmqkit_lite_expired_total - topic: lite topics of the parent that expired or were deleted
gauge rmqkit_lite_clients - topic: clients of the lite groups of the parent
gauge rmqkit_lite_subscriptions - topic: pairs of a client and a lite topic to which it subscribes
gauge rmqkit_lite_dirty - topic: pairs of a client (in wildcard groups: a group) and a lite topic that may have \
messages to deliver
gauge rmqkit_lite_batches - topic: pairs of a group and a lite topic with messages that are not acknowledged
"""
_BOTH = """
histogram rocketmq_rpc_latency milliseconds protocol_type request_code response_code is_long_polling result: time \
from reading a request to its answer
gauge rmqkit_lane_requests - lane: requests of a lane that are running or waiting
gauge rmqkit_lane_requests_max - lane: limit of requests of a lane; above it, the answer is SYSTEM_BUSY
"""
_ALL = """
histogram rmqkit_event_loop_lag milliseconds: how late the event loop runs a timer, measured ten times a second
gauge rmqkit_connections -: connections of clients and of other servers
gauge rmqkit_incomplete_frame bytes: bytes of incomplete frames in memory
counter rmqkit_connections_refused_total - limit: connections closed at once: too many in `all` or of one `address`
counter rmqkit_connections_cut_total -: connections closed because incomplete frames used too much memory
gauge rmqkit_unsent bytes: bytes of unsent answers in memory
counter rmqkit_connections_cut_unsent_total -: connections closed because unsent answers used too much memory
"""
_NAME_SERVER = """
gauge rmqkit_namesrv_clusters -: clusters of registered brokers
gauge rmqkit_namesrv_brokers -: addresses of registered brokers
gauge rmqkit_namesrv_topics -: topics that have a route
"""
_PROXY = """
gauge rocketmq_proxy_up - proxy_mode: 1
gauge rmqkit_proxy_clients -: clients of gRPC that called within the last two minutes, or have a stream
gauge rmqkit_proxy_streams -: Telemetry streams that are open
gauge rmqkit_proxy_calls -: calls under way, held receives among them
counter rmqkit_proxy_answers_total - method code: calls that were answered, by the code of their status
gauge rmqkit_proxy_held_messages -: messages whose invisible time is extended for push consumers
"""
_TIMER = """
gauge rocketmq_timer_enqueue_lag - storage_type storage_medium: timed messages that are not on the wheel yet
gauge rocketmq_timer_enqueue_latency milliseconds storage_type storage_medium: age of the oldest of these messages
gauge rocketmq_timer_dequeue_lag - storage_type storage_medium: timed messages on the wheel, due or not
gauge rocketmq_timer_dequeue_latency milliseconds storage_type storage_medium: how late the oldest undelivered second \
is
gauge rocketmq_timing_messages - storage_type storage_medium topic: pending timed messages
counter rocketmq_timer_enqueue_total - storage_type storage_medium topic: timed messages put on the wheel
counter rocketmq_timer_dequeue_total - storage_type storage_medium topic: timed messages taken off the wheel
gauge rocketmq_timer_message_snapshot - storage_type storage_medium timer_bound_s: timed messages that are due within \
this number of seconds, but not within the next lower one
histogram rocketmq_delay_message_latency seconds storage_type storage_medium topic: delay of timed messages when they \
were sent
"""
_POP = """
histogram rocketmq_pop_buffer_scan_time_consume milliseconds: time of a scan of the ack buffer
counter rocketmq_pop_revive_in_message_total - topic consumer_group revive_message_type put_status: check points and \
acks stored
counter rocketmq_pop_revive_out_message_total - topic consumer_group revive_message_type queue_id: finished check \
points and acks
counter rocketmq_pop_revive_retry_messages_total - topic consumer_group put_status: messages that are delivered again
gauge rocketmq_pop_revive_lag milliseconds queue_id: NUMBER of check points (in spite of the name) whose invisible \
time is over and that are not revived
gauge rocketmq_pop_revive_latency milliseconds queue_id: how late the oldest of these check points is
gauge rocketmq_pop_offset_buffer_size -: acks in the ack buffer (in Apache's broker: offsets to commit)
gauge rocketmq_pop_checkpoint_buffer_size -: check points in the ack buffer
"""


def _rows(text: str, servers: Server, absent: str = "") -> Iterator[Metric]:
    for line in text.strip().splitlines():
        head, _, meaning = line.partition(": ")
        kind, name, unit, *labels = head.replace("-:", "-").split()
        yield Metric(
            name=name,
            kind=Kind(kind),
            unit=unit.strip("-"),
            labels=tuple(labels),
            help=meaning,
            servers=servers,
            absent=absent,
            buckets=_BUCKETS[name] if kind == "histogram" else (),
        )


TABLE: tuple[Metric, ...] = (
    *_rows(_BROKER, Server.BROKER),
    *_rows(_BOTH, Server.BOTH),
    *_rows(_ALL, Server.ALL),
    *_rows(_NAME_SERVER, Server.NAME_SERVER),
    *_rows(_PROXY, Server.PROXY),
    *_rows(_TIMER, Server.BROKER),
    *_rows(_POP, Server.BROKER),
)


class Histogram:
    """A histogram. ``counts`` has the number of values in each bucket, and of values above all bounds."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Add a value that occurred ``count`` times."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.sum += value * count

    def observe_all(self, values: Sequence[float]) -> None:
        """Add many values. Sorting them reduces the searches to one for each bucket that has values."""
        in_order, counts, counted = sorted(values), self.counts, 0
        while counted < len(in_order):
            bucket = bisect_left(self.bounds, in_order[counted])
            until = len(in_order) if bucket == len(self.bounds) else bisect_right(in_order, self.bounds[bucket])
            # The value at `counted` is not above the bound of its bucket, so `until` is greater.
            assert until > counted, "each iteration advances"
            counts[bucket] += until - counted
            counted = until
        self.sum += sum(values)

    def observe_each(self, values: Sequence[float], counts: Sequence[int]) -> None:
        """Add values with their counts. This is fast in the usual case that all values are in the same bucket."""
        if not values:
            return
        bucket = bisect_left(self.bounds, min(values))
        if bucket == len(self.bounds) or max(values) <= self.bounds[bucket]:
            self.counts[bucket] += sum(counts)
            self.sum += sum(map(mul, values, counts))
        else:
            for value, count in zip(values, counts, strict=True):
                self.observe(value, count)


Gathered = dict[str, Mapping[tuple[str, ...], "float | Histogram"]]
"""The values of metrics: metric name → label values, in the order of the table → value."""

_BOUNDS = {metric.name: metric.buckets for metric in TABLE}
assert len(_BOUNDS) == len(TABLE), "each metric has one row"


def histogram(name: str) -> Histogram:
    """Return an empty histogram with the buckets of a metric."""
    return Histogram(_BOUNDS[name])


_POLLS = frozenset((RequestCode.PULL_MESSAGE, RequestCode.LITE_PULL_MESSAGE))


class RpcLatency(dict[tuple[int, int, bool, str], Histogram]):
    """The values of ``rocketmq_rpc_latency``. The keys are request code, response code, True if the response was held,
    and the result of sending it; the values are times in ms. After `_KEYS_MAX` keys, request code -1 counts all
    others."""

    _KEYS_MAX = 2048

    def __missing__(self, key: tuple[int, int, bool, str]) -> Histogram:
        # Limit the keys: peers may send any code, and could make the table grow for ever.
        if len(self) >= self._KEYS_MAX:
            key = -1, *key[1:]
        return self.setdefault(key, histogram("rocketmq_rpc_latency"))

    def gather(self) -> dict[tuple[str, ...], float | Histogram]:
        """Return the histograms with texts as labels. Only held responses to pulls have the label of long polling."""
        gathered: dict[tuple[str, ...], float | Histogram] = {}
        for (code, response_code, is_held, result), found in self.items():
            is_poll = "true" if is_held and code in _POLLS else "false"
            labels = "remoting", _name(RequestCode, code), _name(ResponseCode, response_code), is_poll, result
            known = gathered.setdefault(labels, histogram("rocketmq_rpc_latency"))
            assert isinstance(known, Histogram), "all values of this table are histograms"
            known.counts = [a + b for a, b in zip(known.counts, found.counts, strict=True)]
            known.sum += found.sum
        return gathered


def _name(codes: type[IntEnum], code: int) -> str:
    """Return the label of a code: its name, its number if it has no name, or ``other`` for -1."""
    try:
        return codes(code).name.lower()
    except ValueError:
        return "other" if code < 0 else str(code)


# ---- the exposition for Prometheus, and the settings of the exporter, for all servers


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def exposition(gathered: Gathered, common: Mapping[str, str]) -> bytes:
    """Return the values of metrics as an exposition. ``common``: the labels of every sample."""
    # Import the library here: a broker without an exporter starts faster and needs less memory without the library.
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.metrics_core import Metric as Family
    from prometheus_client.registry import Collector

    def family(metric: Metric, values: Mapping[tuple[str, ...], float | Histogram]) -> Family:
        name = metric.exposed_name
        # The library appends the suffix of counters itself.
        made = Family(name.removesuffix("_total"), metric.help, metric.kind.value)
        for texts, value in values.items():
            labels = {**common, **dict(zip(metric.labels, texts, strict=True))}
            if isinstance(value, Histogram):
                for suffix, bound, number in _samples(value):
                    made.add_sample(f"{name}_{suffix}", {**labels, **bound}, number)
            else:
                made.add_sample(name, labels, value)
        return made

    class Families(Collector):
        def collect(self) -> Iterable[Family]:
            metrics = {metric.name: metric for metric in TABLE}
            return (family(metrics[name], values) for name, values in sorted(gathered.items()) if values)

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Families())
    return generate_latest(registry)


def _samples(value: Histogram) -> Iterator[tuple[str, dict[str, str], float]]:
    """Yield the samples of a histogram: cumulative buckets, count and sum."""
    count = 0
    # Prometheus expects cumulative buckets. `Histogram` has separate buckets, so that a value needs one addition.
    for bound, added in zip((*map(str, value.bounds), "+Inf"), value.counts, strict=True):
        count += added
        yield "bucket", {"le": bound}, count
    yield "count", {}, count
    yield "sum", {}, value.sum


class ExporterType(enum.Enum):
    """The exporters of metrics: none, or Prometheus."""

    DISABLE = "DISABLE"
    PROM = "PROM"


class MetricLabels(str):
    """Labels for every sample, as ``name:value,name:value``. Raises ValueError: a pair does not have this form."""

    __slots__ = ()

    def __new__(cls, text: str = "") -> MetricLabels:
        for pair in filter(None, text.split(",")):
            name, colon, value = pair.partition(":")
            if not (colon and value and name.isidentifier() and name.isascii()):
                raise ValueError(f"{pair!r} is not of the form name:value")
        return super().__new__(cls, text)

    @property
    def pairs(self) -> dict[str, str]:
        return dict(pair.split(":", 1) for pair in self.split(",") if pair)


class ExporterSettings(Struct, kw_only=True):
    """The settings about metrics in a configuration file."""

    exporter_type: Annotated[ExporterType, Setting("metricsExporterType", "exporter: none, or Prometheus")] = (
        ExporterType.DISABLE
    )
    exporter_port: Annotated[
        int, Setting("metricsPromExporterPort", "port for Prometheus; 0 means a free port", low=0, high=65535)
    ] = 5557
    exporter_host: Annotated[str, Setting("metricsPromExporterHost", "address of this port; default: bindAddress")] = ""
    metric_labels: Annotated[
        MetricLabels, Setting("metricsLabel", "labels for every sample, as name:value,name:value")
    ] = MetricLabels()


EXPORTER_PROMISES = {"metricsInDelta": ("false",)}
"""The only accepted value, because Prometheus reads sums instead of differences."""

EXPORTERS_WITHOUT_EFFECT = frozenset(
    """
    metricsGrpcExporterTarget metricsGrpcExporterHeader metricGrpcExporterTimeOutInMills metricsOtelCardinalityLimit
    metricGrpcExporterIntervalInMills metricLoggingExporterIntervalInMills
    """.split()
)
"""The keys of exporters that rmqkit does not have."""

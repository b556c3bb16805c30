"""Apache's broker and ours report the same metrics to Prometheus after the same requests: names, kinds, labels,
buckets, sums.

Both get the raw requests of `Load`, sent by one client that stays connected while the metrics are read. Times are not
compared, nor the broker's own work, such as reading half messages and registering. Source: behaviour.md §9.10.
"""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import pytest
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.parser import text_string_to_metric_families

from rmqkit.broker.settings import BrokerSettings
from rmqkit.filter import subscription
from rmqkit.metrics import COMMON, TABLE, ExporterType, MetricLabels
from rmqkit.protocol.codes import RequestCode as Code
from rmqkit.protocol.command import Command, decode_fields, decode_header
from rmqkit.protocol.message import read_messages
from rmqkit.protocol.record import BatchEntry, encode_batch
from rmqkit.protocol.schemas.clients import ConsumerData, HeartbeatData, ProducerData
from rmqkit.protocol.schemas.pop import PopMessageResponse
from rmqkit.remoting.client import RemotingClient
from rmqkit.remoting.router import Router
from rmqkit.standalone import Standalone
from rmqkit.store.settings import StoreSettings
from tests.interop.apache import BROKER_NAME, CLUSTER, HOST, QUICK_CONF, open_store_with_apache
from tests.interop.kit import ApacheKit
from tests.patience import TIMEOUT_MS
from tests.ports import free_port

TOPIC, GROUP, PRODUCERS = "Metered", "metering", "metered"
TIMED_TOPIC = "MeteredLater"
POP_TOPIC, POP_GROUP = "MeteredPops", "popping"
SECONDS_MAX = 150
SETTLE_SECONDS = 60
NEVER_MS = 3_600_000
ONE_WAY = 2
TABLE_BY_NAME = {metric.exposed_name: metric for metric in TABLE}
OF_THE_EXPORTER = {"target_info", "otel_scope_info"}
OTEL_SCOPE = "otel_scope_name"
COUNTED = (
    "rocketmq_messages_in",
    "rocketmq_throughput_in",
    "rocketmq_message_size",
    "rocketmq_messages_out",
    "rocketmq_throughput_out",
    "rocketmq_send_to_dlq_messages",
    "rocketmq_commit_messages",
    "rocketmq_rollback_messages",
    "rocketmq_finish_message_latency_milliseconds",
    "rocketmq_half_messages",
    "rocketmq_broker_permission",
    "rocketmq_producer_connections",
    "rocketmq_consumer_connections",
    "rocketmq_consumer_lag_messages",
    "rocketmq_consumer_inflight_messages",
    "rocketmq_consumer_ready_messages",
    "rocketmq_timer_enqueue_lag",
    "rocketmq_timer_dequeue_lag",
    "rocketmq_timing_messages",
    "rocketmq_timer_enqueue",
    "rocketmq_timer_dequeue",
    "rocketmq_timer_message_snapshot",
    "rocketmq_delay_message_latency_seconds",
)
POP_COUNTED = ("rocketmq_pop_revive_in_message", "rocketmq_pop_revive_retry_messages")
POP_TOLD = (
    "rocketmq_pop_revive_out_message",
    "rocketmq_pop_revive_lag_milliseconds",
    "rocketmq_pop_revive_latency_milliseconds",
    "rocketmq_pop_offset_buffer_size",
    "rocketmq_pop_checkpoint_buffer_size",
)
"""Metrics of which labels are compared, not values: our broker redelivers at once, Apache's reads records more than
once.
"""
TIMED = (
    "rocketmq_rpc_latency_milliseconds",
    "rocketmq_topic_create_execution_time_milliseconds",
    "rocketmq_consumer_group_create_execution_time_milliseconds",
)
OWN_REQUESTS = {"update_broker_config", "get_broker_runtime_info", "register_broker", "get_max_offset"}
"""Requests of the fixture, and requests that are repeated until a state is reached."""

Page = Mapping[str, Family]


class Load:
    """The requests to one broker."""

    def __init__(self, address: str) -> None:
        self._address = address
        dispatch = Router()
        for code in (Code.NOTIFY_CONSUMER_IDS_CHANGED, Code.CHECK_TRANSACTION_STATE):
            dispatch.register(code, lambda connection, command: None)
        self.client = RemotingClient(dispatch)

    async def run(self) -> None:
        await self._begin()
        await self._send_all()
        await self._send_timed()
        await self._end_transactions()
        await self._consume()
        await self._ask_for_the_impossible()

    async def _ask(self, code: int, body: bytes = b"", **fields: object) -> Command:
        texts = {name: str(value) for name, value in fields.items()}
        return await self.client.call(self._address, Command(code, fields=texts or None, body=body), TIMEOUT_MS)

    async def _send(
        self, body: bytes, properties: str = "", *, code: int = Code.SEND_MESSAGE_V2, **more: object
    ) -> Command:
        properties += f"UNIQ_KEY\x010A{time.time_ns():030X}\x02"
        fields = {"a": PRODUCERS, "b": TOPIC, "c": "TBW102", "i": properties, "k": "false", "m": "false"}
        numbers = {"d": 4, "e": 0, "f": 0, "h": 0, "j": 0, "g": time.time_ns() // 1_000_000}
        return await self._ask(code, body, **{**fields, **numbers, **more})

    async def _pull(self, offset: int, count: int, topic: str = TOPIC, flags: int = 4) -> Command:
        return await self._ask(
            Code.PULL_MESSAGE,
            consumerGroup=GROUP,
            topic=topic,
            queueId=0,
            queueOffset=offset,
            maxMsgNums=count,
            sysFlag=flags,
            commitOffset=0,
            suspendTimeoutMillis=200,
            subscription="*",
            subVersion=1,
        )

    async def _until_max(self, topic: str, offset: int) -> None:
        async with asyncio.timeout(SECONDS_MAX):
            while int(decode_fields(await self._ask(Code.GET_MAX_OFFSET, topic=topic, queueId=0))["offset"]) < offset:
                await asyncio.sleep(0.05)

    async def _begin(self) -> None:
        queues = {
            "readQueueNums": 1,
            "writeQueueNums": 1,
            "perm": 6,
            "topicFilterType": "SINGLE_TAG",
            "topicSysFlag": 0,
        }
        for topic in (TOPIC, "not a name", "TBW102"):
            await self._ask(Code.UPDATE_AND_CREATE_TOPIC, topic=topic, defaultTopic="TBW102", order="false", **queues)
        group = {"groupName": GROUP, "retryQueueNums": 1, "retryMaxTimes": 16, "consumeEnable": True}
        await self._ask(Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, json.dumps(group).encode())
        consumers = [
            ConsumerData(
                group_name=name,
                subscription_data_set=[subscription(topic, "*", version=1) for topic in (TOPIC, f"%RETRY%{name}")],
                consume_type=kind,
                message_model="CLUSTERING",
                consume_from_where="CONSUME_FROM_FIRST_OFFSET",
            )
            for name, kind in ((GROUP, "CONSUME_PASSIVELY"), ("active", "CONSUME_ACTIVELY"))
        ]
        data = HeartbeatData(clientID="metered", consumerDataSet=consumers, producerDataSet=[ProducerData(PRODUCERS)])
        await self._ask(Code.HEART_BEAT, msgspec.json.encode(data))

    async def _send_all(self) -> None:
        for size in (*[10] * 10, *[2000] * 8, *[50_000] * 2):
            await self._send(b"x" * size)
        await asyncio.gather(*(self._send(b"%d" % n, "KEYS\x01k\x02") for n in range(30)))  # in one run or several
        await self._send(encode_batch([BatchEntry(b"abc", b"", 0)] * 5), code=Code.SEND_BATCH_MESSAGE, m="true")
        await self._send(b"ordered", "__SHARDINGKEY\x01k\x02")
        await self._send(b"later", "DELAY\x011\x02")
        await self._send(b"a trace", b="RMQ_SYS_TRACE_TOPIC")
        await self._send(b"forbidden", b="SELF_TEST_TOPIC")

    async def _send_timed(self) -> None:
        """Send one message that is delivered during the load after a wait, and one that waits two hours."""
        for seconds in (5, 7200):
            at_ms = (time.time_ns() // 10**9 + seconds) * 1000
            await self._send(
                b"timed", f"TIMER_DELIVER_MS\x01{at_ms}\x02", b=TIMED_TOPIC, g=at_ms - seconds * 1000 - 500
            )
        await self._until_max(TIMED_TOPIC, 1)

    async def pop(self) -> None:
        """Pop three messages, acknowledge two, and pop the third again. Pop two more without an acknowledgement."""
        queues = {"readQueueNums": 1, "writeQueueNums": 1, "perm": 6, "topicFilterType": "SINGLE_TAG"}
        topic = {"topic": POP_TOPIC, "defaultTopic": "TBW102", "topicSysFlag": 0, "order": "false"}
        await self._ask(Code.UPDATE_AND_CREATE_TOPIC, **topic, **queues)
        for number in range(5):
            await self._send(b"%d" % number, b=POP_TOPIC)
        await self._until_max(POP_TOPIC, 5)
        first = decode_header(await self._pop(count=3, invisible_ms=10_000), PopMessageResponse)
        handle = f"0 {first.pop_time} {first.invisible_time} {first.revive_qid} 0 {BROKER_NAME} 0"
        place = {"consumerGroup": POP_GROUP, "topic": POP_TOPIC, "queueId": 0}
        for offset in (0, 1):
            await self._ask(Code.ACK_MESSAGE, extraInfo=f"{handle} {offset}", offset=offset, **place)
        async with asyncio.timeout(SECONDS_MAX):
            times = [0]
            while not any(times):
                popped = await self._pop(count=32, invisible_ms=600_000)
                times = [message.reconsume_times for message in read_messages(bytes(popped.payload))]

    async def _pop(self, *, count: int, invisible_ms: int) -> Command:
        return await self._ask(
            Code.POP_MESSAGE,
            consumerGroup=POP_GROUP,
            topic=POP_TOPIC,
            queueId=-1,
            maxMsgNums=count,
            invisibleTime=invisible_ms,
            pollTime=5000,
            bornTime=time.time_ns() // 1_000_000,
            initMode=0,
            expType="TAG",
            exp="*",
        )

    async def _end_transactions(self) -> None:
        """Commit twice, once late, roll back one transaction, and leave one open."""
        for decision, age_ms in ((8, 0), (8, 7000), (12, 0), (None, 0)):
            properties = f"TRAN_MSG\x01true\x02PGROUP\x01{PRODUCERS}\x02"
            born_ms = time.time_ns() // 1_000_000 - age_ms
            sent = decode_fields(await self._send(b"half", properties, f=4, g=born_ms))
            if decision is not None:
                await self._ask(
                    Code.END_TRANSACTION,
                    producerGroup=PRODUCERS,
                    tranStateTableOffset=sent["queueOffset"],
                    commitLogOffset=int(sent["msgId"][16:], 16),
                    commitOrRollback=decision,
                    fromTransactionCheck="false",
                    msgId=sent["msgId"],
                    transactionId=sent["transactionId"],
                )

    async def _consume(self) -> None:
        """Pull, also with a wait at the broker, send messages back, and get a dead letter and retries."""
        await self._until_max(TOPIC, 59)
        for offset, count in ((0, 10), (10, 32), (42, 32)):
            await self._pull(offset, count)
        await self._pull(59, 32, flags=6)
        pulled = read_messages(bytes((await self._pull(0, 3)).payload))
        for message, level in zip(pulled, (1, 1, -1), strict=True):
            back = {"originMsgId": message.msg_id, "originTopic": TOPIC, "maxReconsumeTimes": 16}
            await self._ask(
                Code.CONSUMER_SEND_MSG_BACK,
                offset=message.physical_offset,
                group=GROUP,
                delayLevel=level,
                unitMode="false",
                **back,
            )
        await self._until_max(f"%RETRY%{GROUP}", 2)
        await self._pull(0, 32, f"%RETRY%{GROUP}")
        await self._send(b"once more", f"RETRY_TOPIC\x01{TOPIC}\x02", b=f"%RETRY%{GROUP}", j=1, l=16)
        await self._ask(Code.UPDATE_CONSUMER_OFFSET, consumerGroup=GROUP, topic=TOPIC, queueId=0, commitOffset=20)
        fields = {"consumerGroup": "unknown", "topic": TOPIC, "queueId": "0", "commitOffset": "5"}
        one_way = Command(Code.UPDATE_CONSUMER_OFFSET, flag=ONE_WAY, fields=fields)
        await self.client.send_one_way(self._address, one_way, TIMEOUT_MS)

    async def _ask_for_the_impossible(self) -> None:
        await self._ask(99_999)
        await self._pull(0, 1, "NoSuchTopic")


@pytest.fixture(scope="module")
def told(apache_kit: ApacheKit, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[tuple[Page, Page]]]:
    """Yield the metrics of Apache's broker and ours after the load, and after pops."""
    work = tmp_path_factory.mktemp("metrics")
    port = free_port()
    conf = {
        "metricsExporterType": "PROM",
        "metricsPromExporterPort": port,
        "metricsPromExporterHost": HOST,
        "metricsLabel": "room:7,row:b",
        "transactionTimeOut": NEVER_MS,
    }
    with open_store_with_apache(apache_kit, work / "store", work, conf) as apache:
        yield asyncio.run(both_pages(apache.broker_addr, f"{HOST}:{port}", work / "ours"))


@pytest.fixture(scope="module")
def pages(told: list[tuple[Page, Page]]) -> tuple[Page, Page]:
    return told[0]


@pytest.fixture(scope="module")
def pops(told: list[tuple[Page, Page]]) -> tuple[Page, Page]:
    """Return the metrics of POP. Apache's broker counts check points as timed messages too, and other families have one
    more label for groups that pop."""
    theirs, ours = ({name: one for name, one in page.items() if "_pop_" in name} for page in told[1])
    return theirs, ours


async def both_pages(apache: str, apache_metrics: str, root: Path) -> list[tuple[Page, Page]]:
    broker = BrokerSettings(
        listen_port=0,
        bind_address=HOST,
        broker_name=BROKER_NAME,
        cluster_name=CLUSTER,
        property_filter=True,
        exporter_type=ExporterType.PROM,
        exporter_port=0,
        metric_labels=MetricLabels("room:7,row:b"),
        transaction_timeout_ms=NEVER_MS,
    )
    store = StoreSettings(commit_log_file_bytes=1 << 20, message_delay_level=str(QUICK_CONF["messageDelayLevel"]))
    async with Standalone(root, broker=broker, store=store) as ours:
        loads = Load(apache), Load(ours.broker_address)
        try:
            found: list[tuple[Page, Page]] = []
            for work, names, timed in ((Load.run, COUNTED, TIMED), (Load.pop, POP_COUNTED, ())):
                await asyncio.gather(*map(work, loads))
                addresses = apache_metrics, ours.metrics_addresses[1]
                found.append(await asyncio.to_thread(settled, addresses, names, timed))
        finally:
            await asyncio.gather(*(load.client.close() for load in loads))
    return found


def settled(addresses: tuple[str, str], names: Sequence[str], timed: Sequence[str]) -> tuple[Page, Page]:
    """Return the metrics of both when their counts are equal, or at the end of the time: background work may be in
    progress.
    """

    def counts(page: Page) -> list[object]:
        return [*(sums(page, name) for name in names), *(times_of(page, name) for name in timed)]

    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        theirs, ours = map(page, addresses)
        if counts(theirs) == counts(ours) or time.monotonic() > deadline:
            return theirs, ours
        time.sleep(0.2)


def sums(page: Page, name: str) -> dict[tuple[object, ...], float]:
    return {key: n for key, n in samples(page.get(name)).items() if "CID_RMQ_SYS_TRANS" not in str(key)}


def times_of(page: Page, name: str) -> dict[tuple[object, ...], float]:
    """Return the number of timed operations."""
    return {
        key: count
        for key, count in samples(page.get(name)).items()
        if str(key[0]).endswith("_count") and dict(key[1:]).get("request_code") not in OWN_REQUESTS
    }


def page(address: str) -> Page:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=SECONDS_MAX) as answer:
        text = answer.read().decode()
    return {one.name: one for one in text_string_to_metric_families(text) if one.name not in OF_THE_EXPORTER}


def samples(family: Family | None) -> dict[tuple[object, ...], float]:
    """Return values by suffix and labels, without labels that name the server."""
    return {
        (
            sample.name,
            *sorted(item for item in sample.labels.items() if item[0] not in (*COMMON, OTEL_SCOPE)),
        ): sample.value
        for sample in (family.samples if family is not None else ())
    }


def label_names(family: Family) -> set[frozenset[str]]:
    return {frozenset(sample.labels.keys() - {OTEL_SCOPE, "le"}) for sample in family.samples}


def exposed(family: Family) -> str:
    return f"{family.name}_total" if family.type == "counter" else family.name


def test_what_apache_reports_is_reported_here_or_is_absent_for_a_reason(pages: tuple[Page, Page]) -> None:
    theirs, ours = pages
    assert theirs.keys() - ours.keys() == {
        name for name, family in theirs.items() if TABLE_BY_NAME[exposed(family)].absent
    }
    assert {name for name in ours if name.startswith("rocketmq_")} <= theirs.keys() | {"rocketmq_lmq_number"}, (
        "since 5.5.1"
    )


@pytest.mark.parametrize("fixture", ["pages", "pops"])
def test_kinds_labels_and_buckets_are_apaches(fixture: str, request: pytest.FixtureRequest) -> None:
    theirs, ours = request.getfixturevalue(fixture)
    own = {"room", "row", *COMMON}
    for family in theirs.values():
        metric = TABLE_BY_NAME[exposed(family)]
        assert metric.kind.value == family.type, family.name
        assert label_names(family) == {frozenset({*metric.labels, *own})}, family.name
        buckets = {float(sample.labels["le"]) for sample in family.samples if "le" in sample.labels}
        assert buckets == ({*metric.buckets, float("inf")} if metric.buckets else set()), family.name
        if family.name in ours:
            assert ours[family.name].type == family.type
            assert label_names(ours[family.name]) == label_names(family)


@pytest.mark.parametrize("name", COUNTED)
def test_sums_are_apaches(pages: tuple[Page, Page], name: str) -> None:
    theirs, ours = (sums(one, name) for one in pages)
    assert theirs
    assert ours == theirs


@pytest.mark.parametrize("name", [*POP_COUNTED, *POP_TOLD])
def test_pops_are_reported_as_apache_reports_them(pops: tuple[Page, Page], name: str) -> None:
    theirs, ours = (samples(one.get(name)) for one in pops)
    assert theirs
    assert ours.keys() == theirs.keys()
    assert ours == theirs or name in POP_TOLD


@pytest.mark.parametrize("name", TIMED)
def test_as_many_requests_are_timed_as_apache_times(pages: tuple[Page, Page], name: str) -> None:
    theirs, ours = (times_of(one, name) for one in pages)
    assert theirs
    assert ours == theirs

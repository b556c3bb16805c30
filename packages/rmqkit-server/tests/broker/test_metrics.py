"""The broker's Prometheus metrics. tests/interop/test_metrics.py compares them with those of Apache's broker."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import urllib.request
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from rmqkit.broker.counts import Counts, kind_of
from rmqkit.broker.metrics import BrokerMetrics
from rmqkit.broker.settings import BrokerSettings
from rmqkit.clock import SYSTEM_CLOCK
from rmqkit.metrics import TABLE, ExporterType, Server
from rmqkit.namesrv.settings import NamesrvSettings
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.record import BatchEntry, encode_batch
from rmqkit.protocol.schemas.brokers import HaConnectionInfo, HaRuntimeInfo
from rmqkit.protocol.schemas.pull import PullFlag
from rmqkit.remoting.listening import ListenFailed
from rmqkit.standalone import Standalone
from rmqkit.store.message_store import InnerMessage, PutResult, PutStatus
from rmqkit.store.settings import FlushDiskType
from tests.broker.cluster import Cluster
from tests.broker.lite.lite_peer import GROUP, LitePeer, light, lite_cluster, make_parent, send
from tests.waiting import until

HOST = "127.0.0.1"
PROM = {"exporter_type": ExporterType.PROM, "exporter_port": 0}
PLAIN = b"UNIQ_KEY\x01%b\x02"
ORDERED = b"__SHARDINGKEY\x01%b\x02UNIQ_KEY\x01%b\x02"


async def page(address):
    return await asyncio.to_thread(lambda: urllib.request.urlopen(f"http://{address}/metrics").read().decode())


async def told(address):
    """Return the samples at an address: name → label values of the table's own labels → value."""
    answer = await page(address)
    tables: dict[str, dict] = {}
    labels = {metric.exposed_name: metric.labels for metric in TABLE}
    for family in text_string_to_metric_families(answer):
        own = labels.get(family.name) or labels.get(f"{family.name}_total", ())
        for sample in family.samples:
            if "le" not in sample.labels:
                key = tuple(sample.labels[label] for label in own)
                tables.setdefault(sample.name, {})[key] = sample.value
    return tables


def broker_metrics(cluster):
    return cluster.standalone.metrics_addresses[1]


async def test_sends_pulls_and_what_becomes_of_them_are_reported(tmp_path):
    async with Cluster(tmp_path / "store", broker=PROM) as cluster:
        await asyncio.gather(*(cluster.send(body=bytes(n), properties="UNIQ_KEY\x01A\x02") for n in range(50)))
        await cluster.send(
            body=encode_batch([BatchEntry(b"x", b"", 0)] * 3), code=RequestCode.SEND_BATCH_MESSAGE, batch=True
        )
        await cluster.heartbeat("c", ("T", "*"))
        await cluster.pull(count=20)
        header = {"consumerGroup": "g", "topic": "T", "queueId": 0}
        await cluster.ask(RequestCode.UPDATE_CONSUMER_OFFSET, commitOffset=5, **header)
        found = await told(broker_metrics(cluster))
        size = cluster.standalone.broker.context.store.max_physical_offset
        assert found["rocketmq_messages_in_total"] == {("T", "normal", "false"): 52}  # an empty one is refused
        assert found["rocketmq_throughput_in_total"] == {("T", "normal", "false"): size}
        assert found["rocketmq_message_size_count"] == {("T", "normal", "false"): 50}
        assert found["rocketmq_messages_out_total"] == {("T", "g", "false"): 20}
        key = ("T", "g", "false", "false")
        names = ("lag", "inflight", "ready")
        assert [found[f"rocketmq_consumer_{name}_messages"][key] for name in names] == [47, 15, 32]
        rpc = found["rocketmq_rpc_latency_milliseconds_count"]
        assert rpc["remoting", "send_message_v2", "success", "false", "success"] == 49
        assert rpc["remoting", "send_message_v2", "system_error", "false", "success"] == 1
        assert found["rmqkit_connections"] == {(): 1}
        await cluster.ask(RequestCode.DELETE_TOPIC_IN_BROKER, topic="T")
        gone = await told(broker_metrics(cluster))
        assert not any("T" in key for name in gone for key in gone[name] if name.startswith("rocketmq_m"))


async def test_sends_alone_in_runs_and_of_mixed_topics_are_all_counted(tmp_path):
    async with Cluster(tmp_path / "store", broker=PROM) as cluster:
        for _ in range(300):
            await cluster.send(body=bytes(100), properties="UNIQ_KEY\x01A\x02")
        for topics in ("T" * 100, "T" * 200, "TU" * 50, "U" * 300):
            sends = (cluster.send(topic=topic, body=bytes(5000), properties="UNIQ_KEY\x01A\x02") for topic in topics)
            await asyncio.gather(*sends)
        found, (t, u) = await told(broker_metrics(cluster)), ((topic, "normal", "false") for topic in "TU")
        assert found["rocketmq_messages_in_total"] == found["rocketmq_message_size_count"] == {t: 650, u: 350}
        assert found["rocketmq_throughput_in_total"] == found["rocketmq_message_size_sum"]
        size = found["rocketmq_message_size_sum"][u] / 350
        assert found["rocketmq_message_size_sum"][t] == 350 * size + 300 * (size - 4900)
        rpc = found["rocketmq_rpc_latency_milliseconds_count"]
        assert rpc["remoting", "send_message_v2", "success", "false", "success"] == 1000


async def test_timed_messages_are_reported_by_topic_and_by_how_far_ahead_they_are(tmp_path):
    async with Cluster(tmp_path / "store", broker=PROM) as cluster:
        timer, now_ms = cluster.standalone.broker.context.timer, SYSTEM_CLOCK.now_ms()
        for ahead_s in (200, 200, 7200, 100_000):
            properties = f"TIMER_DELIVER_MS\x01{now_ms + ahead_s * 1000}\x02"
            await cluster.send(properties=properties)
        async with asyncio.timeout(60):
            while timer.pending < 4:
                await asyncio.sleep(0.01)
        found, local = await told(broker_metrics(cluster)), ("local", "disk")
        assert found["rocketmq_timing_messages"] == {(*local, "T"): 4}
        assert found["rocketmq_timer_enqueue_total"] == {(*local, "T"): 4}
        assert found["rocketmq_timer_dequeue_lag"] == {local: 4}
        assert found["rocketmq_timer_enqueue_lag"] == found["rocketmq_timer_enqueue_latency_milliseconds"] == {local: 0}
        ahead = {int(bound): count for (*_, bound), count in found["rocketmq_timer_message_snapshot"].items()}
        assert {bound: count for bound, count in ahead.items() if count} == {300: 2, 14_400: 1}
        assert sorted(ahead) == [5, 60, 300, 900, 3600, 14_400, 28_800, 86_400]
        assert found["rocketmq_delay_message_latency_seconds_count"] == {(*local, "T"): 4}


@pytest.mark.parametrize("counts_lag", [False, True])
async def test_lite_topics_are_reported_by_their_parent_and_never_by_their_name(tmp_path, counts_lag):
    async with lite_cluster(tmp_path / "store", broker=PROM | {"lite_lag_metrics": counts_lag}) as cluster:
        await make_parent(cluster, "Quiet")
        peer = LitePeer(cluster)
        await peer.subscribe("s-1", "s-2", "s-3")
        await send(cluster, "s-1", "0", "1", "2")
        await send(cluster, "s-2", "0")
        (one, *_) = await peer.pop(1)
        await peer.ack(one)
        await cluster.ask(RequestCode.DELETE_TOPIC_IN_BROKER, topic=light("s-2"))
        found = await told(broker_metrics(cluster))
        names = ("topics", "expired_total", "clients", "subscriptions", "batches")
        values = {name: found[f"rmqkit_lite_{name}"] for name in names}
        assert {name: value["LT",] for name, value in values.items()} == dict(zip(names, (1, 1, 1, 3, 0), strict=True))
        assert all(value["Quiet",] == 0 for value in values.values())
        assert found["rocketmq_lmq_number"] == {(): 1}
        lag = found.get("rocketmq_consumer_lag_messages", {})
        assert lag == ({("LT", GROUP, "false", "false"): 2} if counts_lag else {})
        assert "s-1" not in await page(broker_metrics(cluster))


async def test_held_pulls_are_long_polls_and_answers_that_wait_for_the_disk_are_not(tmp_path):
    async with Cluster(tmp_path / "store", broker=PROM, store={"flush_disk_type": FlushDiskType.SYNC_FLUSH}) as cluster:
        await cluster.send()
        held = asyncio.create_task(cluster.pull(1, flags=PullFlag.SUBSCRIPTION | PullFlag.SUSPEND))
        await until(lambda: len(cluster.standalone.broker.context.long_polling) == 1, "a held pull")
        await cluster.send()
        await held
        rpc = (await told(broker_metrics(cluster)))["rocketmq_rpc_latency_milliseconds_count"]
        assert rpc["remoting", "send_message_v2", "success", "false", "success"] == 2
        assert rpc["remoting", "pull_message", "success", "true", "success"] == 1


async def test_everything_that_is_reported_is_in_the_table_and_of_the_right_server(tmp_path):
    rows = {metric.exposed_name: metric for metric in TABLE}
    broker, namesrv = (kind(listen_port=0, bind_address=HOST, **PROM) for kind in (BrokerSettings, NamesrvSettings))
    async with Standalone(tmp_path / "store", broker=broker, namesrv=namesrv) as both:
        for server, address in zip((Server.NAME_SERVER, Server.BROKER), both.metrics_addresses, strict=True):
            names = {line.split()[2] for line in (await page(address)).splitlines() if line.startswith("# TYPE")}
            assert "rmqkit_event_loop_lag_milliseconds" in names
            assert all(server in rows[name].servers and not rows[name].absent for name in names)


async def test_slaves_are_notified(tmp_path):
    async with Cluster(tmp_path / "store", broker=PROM) as cluster:
        link = HaConnectionInfo(addr="10.0.0.2:4711", diff=42, in_sync=True)
        copies = SimpleNamespace(status=lambda: HaRuntimeInfo(ha_connection_info=[link]))
        context = cluster.standalone.broker.context
        found = await BrokerMetrics(context.counts, context, copies, SimpleNamespace(lanes=set()), []).gather()
        assert found["rmqkit_replication_lag"] == {("10.0.0.2:4711",): 42}
        assert found["rmqkit_replication_in_sync"] == {("10.0.0.2:4711",): True}


def test_without_an_exporter_nothing_is_counted_and_the_library_is_not_loaded(tmp_path):
    program = (
        "import asyncio, sys; from pathlib import Path; from rmqkit.standalone import Standalone\n"
        "async def main():\n"
        "    async with Standalone(Path(sys.argv[1])) as both:\n"
        "        assert both.broker.context.counts is None and both.metrics_addresses == ('', '')\n"
        "    assert not {'prometheus_client', 'rmqkit.broker.counts', 'rmqkit.exporter'} & {*sys.modules}\n"
        "asyncio.run(main())"
    )
    done = subprocess.run([sys.executable, "-c", program, tmp_path / "store"], env=os.environ, check=False)
    assert done.returncode == 0


async def test_a_port_in_use_stops_the_start_before_anything_is_written(tmp_path):
    async with Standalone(tmp_path / "a", broker=BrokerSettings(listen_port=0, bind_address=HOST, **PROM)) as one:
        port = int(one.metrics_addresses[1].rpartition(":")[2])
        for kind, name in ((BrokerSettings, "broker"), (NamesrvSettings, "namesrv")):
            taken = kind(listen_port=0, bind_address=HOST, exporter_type=ExporterType.PROM, exporter_port=port)
            with pytest.raises(ListenFailed, match=rf"cannot listen on 127\.0\.0\.1:{port}"):
                await Standalone(tmp_path / "b", **{name: taken}).start()
            assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("properties", "kind"),
    [
        (b"", "normal"),
        (b"XDELAY\x011\x02", "normal"),
        (b"a\x01DELAY\x02", "normal"),
        (b"DELAY\x011\x02", "delay"),
        (b"a\x01b\x02TIMER_DELAY_MS\x0110", "delay"),
        (b"DELAY\x011\x02__SHARDINGKEY\x01k\x02", "fifo"),
        (b"__SHARDINGKEY\x01k\x02TRAN_MSG\x01true\x02", "transaction"),
        (b"TRAN_MSG\x01false\x02", "normal"),
    ],
)
def test_the_kind_of_a_message_is_in_its_properties(properties, kind):
    assert kind_of(properties) == kind


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from((1023, 1024, 1025, 5000, 3 << 20))), min_size=1))
def test_a_run_counts_as_its_messages_do_one_by_one(sent):
    kinds = [(RequestCode.SEND_MESSAGE, "normal"), (RequestCode.SEND_MESSAGE_V2, "normal")]
    kinds.append((RequestCode.SEND_MESSAGE_V2, "fifo"))
    together, alone = Counts(SYSTEM_CLOCK), Counts(SYSTEM_CLOCK)
    run, at = {}, 0
    for place, size in sent:
        properties = (ORDERED % (b"k", b"k")) if kinds[place][1] == "fifo" else PLAIN % b"k"
        alone.put(InnerMessage("T", 0, b"", properties, 0, 0, 0, b"", b""), PutResult(PutStatus.OK, at, at + size))
        run.setdefault(kinds[place], []).append(size)
        at += size
    together.sends([("T", *kind, sizes) for kind, sizes in run.items()], 1.0)
    assert seen(together) == seen(alone)
    v1_count = sum(place == 0 for place, _ in sent)
    wanted = {RequestCode.SEND_MESSAGE: v1_count, RequestCode.SEND_MESSAGE_V2: len(sent) - v1_count}
    together.answered_late(
        {code: count for code, count in wanted.items() if count}, ResponseCode.FLUSH_DISK_TIMEOUT, 1.0
    )
    assert {key[:2]: sum(found.counts) for key, found in together.meter.latency.items()} == {
        (code, response): count
        for code, count in wanted.items()
        for response in (ResponseCode.SUCCESS, ResponseCode.FLUSH_DISK_TIMEOUT)
        if count
    }


def seen(counts):
    counts.fold()
    return {key: (one.messages, one.bytes, one.sizes.counts, one.sizes.sum) for key, one in counts.came.items()}

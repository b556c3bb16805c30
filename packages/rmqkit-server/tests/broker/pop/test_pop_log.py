"""Check points and acks in the revive topic, byte by byte as Apache 5.4.0 stores them (behaviour.md §4.7, §4.9, §4.12).

The literals are bodies and unique keys seen in the revive topic of a 5.4.0 broker.
"""

from __future__ import annotations

import random

import msgspec
import pytest

from rmqkit.broker.pop.check_points import CheckPointStore
from rmqkit.protocol.properties import decode_properties, encode_properties
from rmqkit.protocol.record import decode_record
from rmqkit.protocol.schemas.pop import PopCheckPoint, StoredAck
from rmqkit.store.message_store import InnerMessage
from tests.broker.cluster import Cluster
from tests.broker.pops import ack, context_of, now_ms, pop, sent

REVIVE_TOPIC = "rmq_sys_REVIVE_LOG_DefaultCluster"
CHECK_POINT = (
    b'{"bm":0,"bn":"broker-interop","c":"CG-p0","d":[0,1],"it":20000,"n":2,"pt":1795294447940,"q":0,'
    b'"reviveTime":1795294467940,"ro":0,"so":0,"t":"ObsT"}'
)
ACK = b'{"ao":0,"bn":"broker-interop","c":"CG-p0","pt":1795294447940,"q":0,"so":0,"t":"ObsT"}'
ACKS = b'{"ao":-1,"aol":[0,1],"bn":"broker-interop","c":"CG-p2","pt":1795294448171,"q":2,"so":0,"t":"ObsT"}'


@pytest.mark.parametrize(("kind", "body"), [(PopCheckPoint, CHECK_POINT), (StoredAck, ACK), (StoredAck, ACKS)])
def test_bodies_are_read_and_written_as_apache_does(kind, body):
    assert msgspec.json.encode(msgspec.json.decode(body, type=kind)) == body


def test_bits_of_a_check_point_are_acks():
    check_point = msgspec.json.decode(CHECK_POINT, type=PopCheckPoint)
    assert check_point.offsets_left == {0, 1}
    check_point.acked_bits = 0b10
    assert check_point.offsets_left == {0}
    check_point.diffs, check_point.count, check_point.start_offset = None, 3, 5
    assert check_point.offsets_left == {5, 7}


def stored(cluster):
    """Unique key, tag and body of everything in the revive topic, in the order in which it was put."""
    store = context_of(cluster).store
    raw = [raw for queue in range(8) for raw in store.get(REVIVE_TOPIC, queue, 0, count_max=32).records]
    records = sorted(map(decode_record, raw), key=lambda record: record.physical_offset)
    properties = [decode_properties(record.properties) for record in records]
    return [(one["UNIQ_KEY"], one["TAGS"], record.body) for one, record in zip(properties, records, strict=True)]


async def test_a_pop_and_its_acks_are_stored_as_apache_names_them(tmp_path):
    async with Cluster(tmp_path / "store") as cluster:
        await sent(cluster, *"abc")
        first = await pop(cluster)
        time = first.header.pop_time
        assert (await ack(cluster, first.handles["b"])).code == 0
        (key, tag, body), (ack_key, ack_tag, ack_body) = stored(cluster)
        assert (key, tag) == (f"T@0@0@g@{time}@broker-a@ck", "ck")
        assert body == (
            b'{"bm":0,"bn":"broker-a","c":"g","d":[0,1,2],"it":60000,"n":3,"pt":%d,"q":0,"reviveTime":%d,"ro":0,"so":0,'
            b'"t":"T"}' % (time, time + 60_000)
        )
        assert (ack_key, ack_tag) == (f"T@0@1@g@{time}@broker-a@ack", "ack")
        assert ack_body == b'{"ao":1,"bn":"broker-a","c":"g","pt":%d,"q":0,"so":0,"t":"T"}' % time


async def test_acks_that_are_put_off_are_stored_together(tmp_path):
    async with Cluster(tmp_path / "store", broker={"pop_buffer_merge": True}) as cluster:
        await sent(cluster, *"abc")
        first = await pop(cluster)
        for body in "ca":
            assert (await ack(cluster, first.handles[body])).code == 0
        assert [tag for _, tag, _ in stored(cluster)] == ["ck"]
        context_of(cluster).pop.check_points.write_acks()
        assert [tag for _, tag, _ in stored(cluster)] == ["ck", "bAck"]
        assert msgspec.json.decode(stored(cluster)[1][2], type=StoredAck).ack_offsets == [2, 0]


async def test_what_others_put_into_the_revive_topic_is_taken_in(cluster):
    """A timer can deliver the check points and acks of an Apache broker that used the store before."""

    await sent(cluster, *"ab")
    pop_time = now_ms() - 10_000
    check_point = PopCheckPoint(
        broker_name="broker-a",
        group="g",
        topic="T",
        queue_id=0,
        start_offset=0,
        count=2,
        diffs=[0, 1],
        pop_time=pop_time,
        invisible_time=5000,
        revive_time=pop_time + 5000,
    )
    acked = StoredAck(
        ack_offset=0, broker_name="broker-a", group="g", topic="T", queue_id=0, start_offset=0, pop_time=pop_time
    )
    context_of(cluster).offsets.commit("g", "T", 0, 2)
    for tag, body in (("ck", check_point), ("ack", acked), ("ck", b"rubbish")):
        put = InnerMessage(
            topic=REVIVE_TOPIC,
            queue_id=3,
            body=body if isinstance(body, bytes) else msgspec.json.encode(body),
            string=encode_properties({"TAGS": tag}),
            flag=0,
            sys_flag=0,
            born_timestamp=now_ms(),
            born_host=context_of(cluster).identity.store_host,
            store_host=context_of(cluster).identity.store_host,
        )
        context_of(cluster).store.put(put)
    again = await pop(cluster, poll_time=20_000)
    assert [(body, one.reconsume_times) for body, one in again.messages.items()] == [("b", 1)]


async def test_a_group_that_a_crash_lost_gets_back_what_it_popped(tmp_path):
    """Groups and offsets are written behind; check points say what was popped since."""

    async with Cluster(tmp_path / "store") as cluster:
        await sent(cluster, *"ab")
        await pop(cluster, invisible_time=200)
    for name in ("consumerOffset", "subscriptionGroup"):
        for path in (tmp_path / "store" / "config").glob(f"{name}.json*"):
            path.unlink()
    async with Cluster(tmp_path / "store") as cluster:
        assert context_of(cluster).offsets.get("g", "T", 0) == 2
        assert sorted(await pop(cluster, poll_time=5000, max_msg_nums=2)) == ["a", "b"]


@pytest.mark.parametrize(("committed", "after_start"), [(None, 3), (2, 3), (3, 3), (5, 5)])
async def test_a_check_point_that_is_read_at_a_start_moves_its_group_forward_only(committed, after_start, tmp_path):
    """A message in flight must not be popped a second time before its invisible time is over."""

    async with Cluster(tmp_path / "store") as cluster:
        own = context_of(cluster)
        own.pop.check_points.add("T", "g", 0, [0, 2], pop_time=1, invisible_ms=1 << 50, queue=0)
        if committed is not None:
            own.offsets.commit("g", "T", 0, committed)
        again = CheckPointStore(own.store, own.groups, own.offsets, own.settings, own.clock, own.identity.store_host)
        again.load(8, offsets_at_ms=0, groups_at_ms=0)
        assert own.offsets.get("g", "T", 0) == after_start


async def test_metrics_report_what_was_put_what_is_put_off_and_what_is_late(tmp_path):
    async with Cluster(tmp_path / "store", broker={"pop_buffer_merge": True}) as cluster:
        await sent(cluster, *"abc")
        service, pop_time = context_of(cluster).pop, now_ms() - 5000
        assert context_of(cluster).groups.get("g")
        log, place, queues = service.check_points, ("T", "g"), map(str, range(8))
        log.add(*place, 0, [0, 1], pop_time=pop_time, invisible_ms=1000, queue=3)
        log.ack({(*place, 0, 0, pop_time): [0]})
        told, lag = service.gather(), dict.fromkeys(((queue,) for queue in queues), 0)
        assert told["rocketmq_pop_revive_lag"] == lag | {("3",): 1}
        assert told["rocketmq_pop_revive_latency"]["3",] >= 4000
        assert log.buffered == (1, 1)
        await service.revive.round()
        told = service.gather()
        assert (told["rocketmq_pop_revive_lag"], log.buffered) == (lag, (0, 0))
        assert told["rocketmq_pop_revive_in_message_total"] == {
            (*place, "CK", "PUT_OK"): 1,
            (*place, "ACK", "PUT_OK"): 1,
        }
        assert told["rocketmq_pop_revive_out_message_total"] == {(*place, "CK", "3"): 1, (*place, "ACK", "3"): 1}
        assert told["rocketmq_pop_revive_retry_messages_total"] == {(*place, "PUT_OK"): 1}
        assert sum(told["rocketmq_pop_buffer_scan_time_consume"][()].counts)
        context_of(cluster).topics.remove("T")
        assert not service.gather()["rocketmq_pop_revive_in_message_total"]


@pytest.mark.parametrize("merges", [False, True])
@pytest.mark.parametrize("seed", range(4))
async def test_what_is_read_again_is_what_was_pending(seed, merges, tmp_path):
    """PopService, acks and revivals at random: another log over the same store knows the same."""
    choices = random.Random(seed)

    async with Cluster(tmp_path / "store", broker={"pop_buffer_merge": merges}) as cluster:
        own = context_of(cluster)
        log, handed, position = own.pop.check_points, [], 0
        for step in range(300):
            if choices.random() < 0.4:
                offsets = sorted(choices.sample(range(position, position + 12), choices.randint(1, 8)))
                position = offsets[-1] + 1
                place = ("T", choices.choice("gh"), choices.randrange(2))
                put = log.add(*place, offsets, pop_time=step, invisible_ms=1 << 50, queue=log.next_queue())
                assert put.queue_offset >= 0
                handed.append((*place, offsets[0], step, offsets))
            elif handed:
                *handle, offsets = choices.choice(handed)
                log.ack({tuple(handle): choices.sample(offsets, choices.randint(1, len(offsets)))})
            if choices.random() < 0.1:
                log.write_acks()
                log.commit()
        log.write_acks()
        log.commit()
        again = CheckPointStore(own.store, own.groups, own.offsets, own.settings, own.clock, own.identity.store_host)
        again.load(8, offsets_at_ms=1 << 62, groups_at_ms=1 << 62)
        assert log.pending == again.pending != {}
        assert log.in_flight == again.in_flight
        assert sum(log.in_flight.values()) == sum(map(len, log.pending.values()))

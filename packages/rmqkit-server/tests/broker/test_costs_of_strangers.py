"""The cost of unauthenticated clients for a broker or a name server, measured with plain sockets without our codecs."""

from __future__ import annotations

import asyncio
import json
import struct
import sys
import threading
import time
import zlib

import pytest

from rmqkit.broker.tables import filters
from rmqkit.broker.tables.groups import drop_unused_groups
from rmqkit.filter import sql92
from rmqkit.store.settings import FlushDiskType
from tests.broker.cluster import Cluster
from tests.cpu import slowness
from tests.strangers import Stranger, frame, measured
from tests.waiting import SECONDS, until

SEND, PULL, HEART_BEAT, LOCK, CHECK_CLIENT, REGISTER, SEND_V2, SEND_BATCH, POP = (
    10,
    11,
    34,
    41,
    46,
    103,
    310,
    320,
    200050,
)
NOTHING_FOUND = (19, 210)
ALL_TOPICS, MAKE_TOPICS = 21, 18
MAX_SECONDS = 0.05
"""CPU time of one callback of the loop."""
ATTEMPTS = 5


@pytest.fixture
def beside(tmp_path):
    """Return a function that runs a blocking program of sockets beside a broker. The program gets ``connect``."""
    strangers = []

    def connect(address):
        strangers.append(Stranger(address))
        return strangers[-1]

    def runner(program, **settings):
        async def main():
            async with Cluster(tmp_path / "store", **settings) as cluster:
                try:
                    await asyncio.to_thread(program, cluster, connect)
                finally:
                    for stranger in strangers:
                        stranger.close()

        asyncio.run(main())

    return runner


def broker_of(cluster):
    return cluster.standalone.broker_address, cluster.standalone.broker.context


def heartbeat(*groups, topics=("T",)):
    wanted = [{"topic": topic} for topic in topics]
    consumers = [{"groupName": group, "subscriptionDataSet": wanted} for group in groups]
    return frame(HEART_BEAT, body=json.dumps({"clientID": "c", "consumerDataSet": consumers}).encode())


def names(mark, count):
    return [f"{mark}{i}" for i in range(count)]


def assert_short(attempt, prepare=lambda number: None):
    """In one of several attempts no callback takes `MAX_SECONDS`, or more where Python is slower just then: noise only
    ever adds. Both functions are given the attempt's number; what ``prepare`` does is not measured."""
    took = []
    for number in range(ATTEMPTS):
        prepare(number)
        before = slowness()
        with measured() as callbacks:
            attempt(number)
        took.append((callbacks.longest / max(before, slowness()), callbacks.which))
        if took[-1] < (MAX_SECONDS,):
            return
    raise AssertionError(f"{MAX_SECONDS} s at most: {took}")


@pytest.mark.slow
def test_a_new_group_costs_the_same_however_many_there_are(beside):
    def program(cluster, connect):
        address, context = broker_of(cluster)

        def cost(mark):
            with measured() as callbacks:
                assert connect(address).ask(heartbeat(*names(mark, 250)))["code"] == 0
            return callbacks.total

        cost("warm")
        few = min(cost(f"few{i}") for i in range(3))
        for mark in range(6):
            assert connect(address).ask(heartbeat(*names(f"all{mark}-", 4000), topics=()))["code"] == 0
        assert len(context.groups.stored.subscription_group_table) > 24_000
        assert min(cost(f"many{i}") for i in range(3)) < 4 * few, "it grew with the tables"

    beside(program)


def test_a_heartbeat_at_its_bounds_does_not_hold_the_loop(beside):
    def program(cluster, connect):
        address, _ = broker_of(cluster)

        def attempt(number):
            stranger = connect(address)
            assert stranger.ask(heartbeat(*names(f"a{number}-", 4096), topics=names("t", 2)))["code"] == 0

        assert_short(attempt)

    beside(program)


def test_a_heartbeat_that_names_too_much_is_refused_and_reported_why(beside):
    def program(cluster, connect):
        address, context = broker_of(cluster)
        stranger = connect(address)
        answer = stranger.ask(heartbeat(*names("a", 101)))
        assert (answer["code"], answer["remark"]) == (1, "heartbeat with 101 groups: maxGroupsPerHeartbeat is 100")
        answer = stranger.ask(heartbeat("g", topics=names("t", 201)))
        assert answer["remark"] == "heartbeat with 201 subscriptions: maxSubscriptionsPerHeartbeat is 200"
        assert "a0" not in context.groups
        assert "g" not in context.groups
        for mark in "abb":  # the same groups again cost no more
            assert stranger.ask(heartbeat(*names(mark, 80)))["code"] == 0
        answer = stranger.ask(heartbeat(*names("c", 80)))
        assert (answer["code"], answer["remark"]) == (
            1,
            "a connection with 240 groups: maxGroupsPerConnection is 160",
        )

    limits = {"heartbeat_groups_max": 100, "heartbeat_subscriptions_max": 200, "connection_groups_max": 160}
    beside(program, broker=limits)


def test_only_so_many_groups_that_nobody_used_are_kept(beside):
    def program(cluster, connect):
        address, context = broker_of(cluster)
        stranger = connect(address)
        before = len(context.groups.stored.subscription_group_table)
        assert stranger.ask(heartbeat(*names("a", 200)))["code"] == 0
        assert len(context.groups.stored.subscription_group_table) == before + 120

    beside(program, broker={"unused_groups_max": 120})


async def test_groups_that_appeared_and_that_nobody_used_go_away_and_others_stay(cluster):
    context = cluster.standalone.broker.context
    await cluster.send()
    online = cluster.new_client()
    await cluster.heartbeat("on line", ("T", "*"), group="online", client=online)
    away = cluster.new_client()
    for group in ("unused", "has-offset", "has-retry", "has-dead", "changed", "forbidden"):
        await cluster.heartbeat("away", ("T", "*"), group=group, client=away)
    context.offsets.commit("has-offset", "T", 0, 1)
    await cluster.send(topic="%RETRY%has-retry")
    context.topics.ensure("%DLQ%has-dead", 1)
    table = context.groups.stored.subscription_group_table
    await context.groups.put_shared(table["changed"].__copy__())
    context.groups.forbid_reading("forbidden", "T", is_forbidden=True)
    await away.close()
    await until(lambda: context.clients.consumers("unused") is None)
    assert await drop_unused_groups(context) == 0, "they are too young"
    context.settings.unused_group_keep_ms = 0
    assert await drop_unused_groups(context) == 1
    kept = ("online", "has-offset", "has-retry", "has-dead", "changed", "forbidden")
    assert [group in context.groups for group in kept] == [True] * len(kept)
    assert "unused" not in context.groups
    assert context.topics.get("%RETRY%unused") is None
    assert all(context.topics.get(f"%RETRY%{group}") for group in kept)
    await cluster.heartbeat("back", ("T", "*"), group="unused", client=online)  # as if it had always been there
    assert "unused" in context.groups
    assert context.topics.get("%RETRY%unused") is not None


EXPRESSION = "a = 1 OR b IS NOT NULL"
SUBSCRIPTION = {"topic": "TBW102", "subString": EXPRESSION, "expressionType": "SQL92"}
PLACE = {"consumerGroup": "g", "topic": "TBW102", "queueId": "0", "maxMsgNums": "1"}
PULLED = {"queueOffset": "0", "commitOffset": "0", "suspendTimeoutMillis": "0", "subVersion": "0", "sysFlag": "4"}
POPPED = {"invisibleTime": "60000", "pollTime": "0", "bornTime": "0", "initMode": "0"}
FIRST_EXPRESSIONS = {
    "heartbeat": (
        HEART_BEAT,
        None,
        {"clientID": "c", "consumerDataSet": [{"groupName": "g", "subscriptionDataSet": [SUBSCRIPTION]}]},
    ),
    "pull": (PULL, {**PLACE, **PULLED, "subscription": EXPRESSION, "expressionType": "SQL92"}, None),
    "pop": (POP, {**PLACE, **POPPED, "exp": EXPRESSION, "expType": "SQL92"}, None),
    "check": (CHECK_CLIENT, None, {"clientId": "c", "group": "g", "subscriptionData": SUBSCRIPTION}),
}


@pytest.fixture
def without_parser(monkeypatch):
    """Restore the state of a new process: no lark module, no SQL92 parser. Yield the threads that create a parser."""
    makers: list[threading.Thread] = []

    class NotingTerms(sql92._Terms):
        def __init__(self):
            makers.append(threading.current_thread())

    def forget():
        sql92._grammar.cache_clear()
        sql92._compiled.cache_clear()
        filters.inline_filter.cache_clear()

    for name in [name for name in sys.modules if name.partition(".")[0] == "lark"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sql92, "_Terms", NotingTerms)
    forget()
    yield makers
    forget()  # it belongs to a lark module that no other code imports


@pytest.mark.parametrize(("code", "fields", "body"), FIRST_EXPRESSIONS.values(), ids=FIRST_EXPRESSIONS)
def test_the_first_expression_does_not_hold_the_loop(beside, without_parser, code, fields, body):
    def program(cluster, connect):
        address, parts = broker_of(cluster)
        assert not without_parser, "the start does not wait for the parser"
        with measured() as callbacks:
            answer = connect(address).ask(frame(code, fields, b"" if body is None else json.dumps(body).encode()))
        assert answer["code"] in (0, *NOTHING_FOUND), answer
        assert [thread is threading.main_thread() for thread in without_parser] == [False], "not the loop's thread"
        assert (parts.filters.get("TBW102", "g") is not None) == (code == HEART_BEAT)
        assert callbacks.longest < MAX_SECONDS * slowness(), callbacks.which

    beside(program, broker={"property_filter": True})


def test_a_client_that_leaves_while_the_parser_is_made_is_not_entered(beside, without_parser, monkeypatch):
    asked, may_go_on, prepare = threading.Event(), threading.Event(), sql92.prepare
    monkeypatch.setattr(sql92, "prepare", lambda: (asked.set(), may_go_on.wait(SECONDS), prepare()))

    def program(cluster, connect):
        address, parts = broker_of(cluster)
        leaving, other = connect(address), connect(address)
        code, _, body = FIRST_EXPRESSIONS["heartbeat"]
        leaving.send(frame(code, body=json.dumps(body).encode()))
        assert asked.wait(SECONDS)
        leaving.close()
        assert other.ask(frame(ALL_TOPICS))["code"] == 0, "the loop turns"
        may_go_on.set()
        code, _, body = FIRST_EXPRESSIONS["check"]
        assert other.ask(frame(code, body=json.dumps(body).encode()))["code"] == 0
        assert parts.clients.consumers("g") is None

    beside(program, broker={"property_filter": True})


def test_a_long_body_in_the_dialect_is_refused_before_it_is_read(beside):
    def program(cluster, connect):
        address, _ = broker_of(cluster)
        body = b"{" + b",".join([b"1:1"] * 3_900_000) + b"}"

        def attempt(number):
            stranger = connect(address)
            answer = stranger.ask(frame(LOCK, body=body))
            assert answer["code"] == 1
            assert f"the body has {len(body)} bytes" in answer["remark"]
            answer = stranger.ask(frame(LOCK, body=body[:20_000]))
            assert "only 16384 bytes of anything else are read" in answer["remark"]

        assert_short(attempt)

    beside(program)


def test_a_long_header_closes_the_connection_before_it_comes(beside):
    def program(cluster, connect):
        address, _ = broker_of(cluster)
        stranger = connect(address)
        assert stranger.ask(frame(9999, {"x": "y" * 200_000}))["code"] == 3
        stranger.send(struct.pack(">iI", 5 << 20, 4 << 20))
        assert stranger.is_closed

    beside(program)


def test_a_registration_that_inflates_to_more_than_a_frame_is_refused(beside):
    def program(cluster, connect):
        bomb = zlib.compress(bytes(128 << 20), 1)
        fields = {"brokerName": "b", "brokerAddr": "127.0.0.1:1", "clusterName": "c", "brokerId": "0"}

        def attempt(number):
            stranger = connect(cluster.standalone.namesrv_address)
            answer = stranger.ask(frame(REGISTER, {**fields, "compressed": "true"}, bomb))
            assert answer["code"] == 1
            assert "grows beyond the limit of 16777216 bytes" in answer["remark"]

        assert_short(attempt)

    beside(program)


def test_incomplete_frames_are_bounded_together_and_the_oldest_is_cut_first(beside):
    def program(cluster, connect):
        address, _ = broker_of(cluster)
        limits = cluster.standalone.broker.limits
        half = frame(9999, body=bytes(400_000))[:300_000]
        others = connect(address)
        strangers = []
        for _ in range(5):
            strangers.append(connect(address))
            strangers[-1].send(half)
            wait_for(lambda: limits.cut or limits.incomplete_bytes >= len(half) * len(strangers))
        # The second cut comes as soon as a part of the last frame is too much: the rest of it follows.
        wait_for(lambda: limits.cut == 2 and limits.incomplete_bytes == 3 * len(half))
        assert [strangers[0].is_closed, strangers[1].is_closed] == [True, True]
        for stranger in strangers[2:]:
            assert stranger.ask(frame(9999, body=bytes(400_000))[300_000:])["code"] == 3
        assert others.ask(frame(9999))["code"] == 3
        wait_for(lambda: limits.incomplete_bytes == 0)

    beside(program, broker={"incomplete_bytes_max": 1_000_000})


def test_answers_that_nobody_takes_are_bounded_together_and_who_holds_most_is_cut(beside):
    limit = 20_000_000  # two of the greedy, and far more than the modest one: kernels take different amounts

    def program(cluster, connect):
        address, _ = broker_of(cluster)
        limits = cluster.standalone.broker.limits
        made = {"topicConfigList": [{"topicName": name} for name in names("topic-", 3000)]}
        assert connect(address).ask(frame(MAKE_TOPICS, body=json.dumps(made).encode()))["code"] == 0
        one = len(connect(address).ask(frame(ALL_TOPICS))["body"])
        assert one > 300_000
        modest, *greedy = [connect(address) for _ in range(6)]
        reader = connect(address)
        modest.receive_little()
        wait_for(lambda: limits.unsent_bytes == 0)
        asked = 0
        while not limits.unsent_bytes:
            asked += 1
            modest.send(frame(ALL_TOPICS) + frame(9999))
            for _ in range(2):  # the second one is answered after what was asked before the first
                assert reader.ask(frame(ALL_TOPICS))["code"] == 0
        for stranger in greedy:
            stranger.receive_little()
            stranger.send(frame(ALL_TOPICS) * (asked + 16))
            assert reader.ask(frame(ALL_TOPICS))["code"] == 0
            wait_for(lambda: limits.unsent_bytes <= limit)
        wait_for(lambda: limits.cut_unsent)
        assert reader.ask(frame(9999))["code"] == 3
        assert {modest.answer()["code"] for _ in range(2 * asked)} == {0, 3}, (
            "a connection that holds few bytes is not cut"
        )
        told = limits.gather()
        assert told["rmqkit_connections_cut_unsent_total"] == {(): limits.cut_unsent}
        assert told["rmqkit_unsent"] == {(): limits.unsent_bytes}
        # The modest ones, too: what is noted of them was so at their last answer, and may be taken since.
        for stranger in (*greedy, modest, reader):
            stranger.close()
        wait_for(lambda: limits.unsent_bytes == 0)

    beside(program, broker={"unsent_bytes_max": limit})


def test_connections_are_bounded_by_address_and_in_all(beside):
    def program(cluster, connect):
        address, _ = broker_of(cluster)
        limits = cluster.standalone.broker.limits
        strangers = [connect(address) for _ in range(20)]
        wait_for(lambda: limits.refused["address"] >= 10)
        assert strangers[0].ask(frame(9999))["code"] == 3
        assert strangers[-1].is_closed
        for stranger in strangers:
            stranger.close()
        cluster.standalone.broker.context.settings.connections_max = 3
        wait_for(lambda: limits.count <= 1)
        more = [connect(address) for _ in range(6)]
        wait_for(lambda: limits.refused["all"] >= 1)
        assert more[0].ask(frame(9999))["code"] == 3
        assert more[-1].is_closed

    beside(program, broker={"connections_per_address_max": 10})


def test_one_message_wakes_many_held_pulls_without_holding_the_loop(beside):
    def program(cluster, connect):
        address, context = broker_of(cluster)
        sender, stranger = connect(address), connect(address)
        message = {"producerGroup": "p", "topic": "T", "defaultTopic": "TBW102", "defaultTopicQueueNums": "4"}
        message |= {"queueId": "0", "sysFlag": "0", "bornTimestamp": "1", "flag": "0", "properties": ""}
        count = 5000

        def hold(number):
            pulls = {"consumerGroup": "g", "topic": "T", "queueId": "0", "queueOffset": str(number + 1)}
            pulls |= {"maxMsgNums": "1", "sysFlag": "6", "commitOffset": "0", "suspendTimeoutMillis": "900000"}
            pulls |= {"subscription": "*", "subVersion": "0", "expressionType": "TAG"}
            stranger.send(b"".join(frame(PULL, pulls, opaque=i) for i in range(count)))
            wait_for(lambda: len(context.long_polling) == count)

        def wake(_):
            assert sender.ask(frame(SEND, message, b"m"))["code"] == 0
            answers = [stranger.answer() for _ in range(count)]
            assert {answer["code"] for answer in answers} == {0}
            assert sorted(answer["opaque"] for answer in answers) == [*range(count)]

        assert sender.ask(frame(SEND, message, b"m"))["code"] == 0
        assert_short(wake, hold)

    beside(program)


def wait_for(condition):
    """Wait until the broker's thread has reached a state."""
    until_seconds = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < until_seconds
        time.sleep(0.001)


LARGE_FILES = {"commit_log_file_bytes": 64 << 20}


def batch_of(count, body=b""):
    return (struct.pack(">iiiii", 22 + len(body), 0, 0, 0, len(body)) + body + bytes(2)) * count


def send_fields(**changes):
    message = {"a": "p", "b": "T", "c": "TBW102", "d": "4", "e": "0", "f": "0", "g": "1", "h": "0", "i": "", "j": "0"}
    return message | {"k": "false", "m": "false"} | changes


def test_a_long_batch_does_not_hold_the_loop_and_later_sends_of_its_connection_stay_behind(beside):
    count = 40_000

    def program(cluster, connect):
        address, parts = broker_of(cluster)
        sender, other = connect(address), connect(address)
        assert sender.ask(frame(SEND_V2, send_fields(), b"first"))["code"] == 0

        def attempt(number):
            first = parts.store.max_offset("T", 0)
            requests = [
                frame(SEND_V2, send_fields(), b"before", opaque=1),
                frame(SEND_V2, send_fields(m="true"), batch_of(count), opaque=2),
                frame(SEND_V2, send_fields(), b"between", opaque=3),
                frame(SEND_BATCH, send_fields(m="true"), batch_of(count, b"x"), opaque=4),
                frame(SEND_V2, send_fields(), b"after", opaque=5),
                frame(9999, opaque=6),
            ]
            sender.send(b"".join(requests))
            assert other.ask(frame(9999))["code"] == 3
            answers = {answer["opaque"]: answer for answer in (sender.answer() for _ in requests)}
            offsets = [int(answers[opaque]["extFields"]["queueOffset"]) - first for opaque in range(1, 6)]
            assert offsets == [0, 1, 1 + count, 2 + count, 2 + 2 * count]
            ids = answers[4]["extFields"]["msgId"].split(",")
            assert len(set(ids)) == count
            assert all(parts.store.log.record_at(int(one[-16:], 16)) is not None for one in ids[:: count // 9])
            assert parts.store.max_offset("T", 0) == first + 3 + 2 * count

        assert_short(attempt)

    beside(program, store=LARGE_FILES)


def test_only_so_many_long_batches_are_under_way(beside, monkeypatch):
    monkeypatch.setattr("rmqkit.broker.send.long_batch._UNDER_WAY_MAX", 2)

    def program(cluster, connect):
        address, _ = broker_of(cluster)
        strangers = [connect(address) for _ in range(8)]
        for stranger in strangers:
            stranger.send(frame(SEND_BATCH, send_fields(m="true"), batch_of(50_000)))
        answers = [stranger.answer() for stranger in strangers]
        assert {answer["code"] for answer in answers} == {0, 2}
        assert {answer["remark"] for answer in answers if answer["code"] == 2} == {
            "[OVERLOAD]system busy, start flow control for a while"
        }
        assert strangers[0].ask(frame(SEND_BATCH, send_fields(m="true"), batch_of(5_000)))["code"] == 0

    beside(program, store=LARGE_FILES)


def test_long_batches_wait_for_the_disk_and_are_readable_then(beside):
    def program(cluster, connect):
        address, parts = broker_of(cluster)
        sender = connect(address)

        def attempt(number):
            first = parts.store.max_offset("T", 0)
            answer = sender.ask(frame(SEND_BATCH, send_fields(m="true"), batch_of(60_000)))
            assert (answer["code"], answer["extFields"]["queueOffset"]) == (0, str(first))
            wait_for(lambda: not parts.store.dispatch_behind_bytes)
            assert parts.store.max_offset("T", 0) == first + 60_000

        assert_short(attempt)

    beside(program, store=LARGE_FILES | {"flush_disk_type": FlushDiskType.SYNC_FLUSH})

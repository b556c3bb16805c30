"""Pulls, held and answered (behaviour.md §4.1–§4.4, remoting.md §4.3.2)."""

from __future__ import annotations

import asyncio

import pytest

from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import decode_header
from rmqkit.protocol.headers.offsets import (
    QueryConsumerOffsetRequest,
)
from rmqkit.protocol.headers.pull import PullFlag, PullMessageResponse
from rmqkit.protocol.message import read_messages
from tests.broker.cluster import FAQ


def test_offsets_outside_the_queue_are_moved(run):
    async def scenario(cluster):
        await cluster.send()
        for offset, code, remark, following in [
            (1, ResponseCode.PULL_NOT_FOUND, "OFFSET_OVERFLOW_ONE", 1),
            (8, ResponseCode.PULL_OFFSET_MOVED, "OFFSET_OVERFLOW_BADLY", 1),
        ]:
            answer = await cluster.pull(offset)
            assert (answer.code, answer.remark) == (code, remark)
            assert decode_header(answer, PullMessageResponse).next_begin_offset == following
        empty = await cluster.pull(queue_id=1)
        assert (empty.code, empty.remark) == (ResponseCode.PULL_NOT_FOUND, "NO_MESSAGE_IN_QUEUE")
        empty = await cluster.pull(5, queue_id=1)
        assert (empty.code, empty.remark) == (ResponseCode.PULL_OFFSET_MOVED, "NO_MESSAGE_IN_QUEUE")

    run(scenario)


def test_a_tag_expression_filters(run):
    async def scenario(cluster):
        for tag in "ABCAB":
            await cluster.send(properties=f"TAGS\x01{tag}\x02")
        assert [m.tags for m in read_messages((await cluster.pull(expression="A || C")).body)] == ["A", "C", "A"]
        nothing = await cluster.pull(expression="Z")
        assert (nothing.code, nothing.remark) == (ResponseCode.PULL_RETRY_IMMEDIATELY, "NO_MATCHED_MESSAGE")
        assert decode_header(nothing, PullMessageResponse).next_begin_offset == 5

    run(scenario)


def test_a_held_pull_is_answered_by_the_message_it_waits_for(run):
    async def scenario(cluster):
        await cluster.send()
        waiting = asyncio.ensure_future(
            cluster.pull(1, expression="B", flags=PullFlag.SUBSCRIPTION | PullFlag.SUSPEND, suspend_ms=60_000)
        )
        while not len(cluster.standalone._broker._parts.long_polling):
            await asyncio.sleep(0)
        await cluster.send(properties="TAGS\x01A\x02")
        assert not waiting.done()
        await cluster.send(properties="TAGS\x01B\x02", body=b"for me")
        assert [m.body for m in read_messages((await waiting).body)] == [b"for me"]

    run(scenario)


def test_a_held_pull_ends_when_its_time_is_up(run):
    async def scenario(cluster):
        await cluster.send()
        answer = await cluster.pull(1, flags=PullFlag.SUBSCRIPTION | PullFlag.SUSPEND, suspend_ms=50)
        assert (answer.code, decode_header(answer, PullMessageResponse).next_begin_offset) == (19, 1)

    run(scenario)


def test_a_pull_whose_client_is_gone_is_not_held_on(run):
    async def scenario(cluster):
        await cluster.send()
        other = cluster.new_client()
        flags = PullFlag.SUBSCRIPTION | PullFlag.SUSPEND
        waiting = asyncio.ensure_future(cluster.pull(1, flags=flags, suspend_ms=60_000, client=other))
        held = cluster.standalone._broker._parts.long_polling
        while not len(held):
            await asyncio.sleep(0)
        await other.close()
        await asyncio.gather(waiting, return_exceptions=True)
        while len(held):
            await asyncio.sleep(0)

    run(scenario)


@pytest.mark.parametrize(
    ("pull", "code", "remark"),
    [
        ({"topic": "none"}, ResponseCode.TOPIC_NOT_EXIST, f"topic[none] not exist, apply first please!{FAQ}"),
        (
            {"queue_id": 4},
            ResponseCode.INVALID_PARAMETER,
            "queueId[4] is illegal, topic:[T] topicConfig.readQueueNums:[4] consumer:[127.0.0.1:",
        ),
        ({"queue_id": -1}, ResponseCode.INVALID_PARAMETER, "queueId[-1] is illegal"),
        (
            {"group": "a b"},
            ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
            "subscription group [a b] does not exist, ",
        ),
        ({"flags": 0}, ResponseCode.SUBSCRIPTION_NOT_EXIST, "the consumer's group info not exist"),
        (
            {"expression": "||"},
            ResponseCode.SUBSCRIPTION_PARSE_FAILED,
            "parse the consumer's subscription failed",
        ),
        (
            {"expression_type": "SQL92"},
            ResponseCode.SYSTEM_ERROR,
            "The broker does not support consumer to filter message by SQL92",
        ),
    ],
)
def test_refused_pulls(run, pull, code, remark):
    async def scenario(cluster):
        await cluster.send()
        answer = await cluster.pull(**pull)
        assert answer.code == code
        assert answer.remark.startswith(remark)
        decode_header(answer, PullMessageResponse)

    run(scenario)


def test_registered_subscriptions_filter_and_have_to_be_the_newest(run):
    async def scenario(cluster):
        for tag in "AB":
            await cluster.send(properties=f"TAGS\x01{tag}\x02")
        await cluster.heartbeat("c1", ("T", "B"), version=5)
        assert [m.tags for m in read_messages((await cluster.pull(flags=0, version=5)).body)] == ["B"]
        for pull, code in [
            ({"version": 6}, ResponseCode.SUBSCRIPTION_NOT_LATEST),
            ({"topic": "%RETRY%g"}, ResponseCode.SUBSCRIPTION_NOT_EXIST),
        ]:
            assert (await cluster.pull(flags=0, **pull)).code == code

    run(scenario)


def test_a_pull_commits_the_offset_it_carries(run):
    async def scenario(cluster):
        await cluster.send()
        await cluster.pull(flags=PullFlag.SUBSCRIPTION | PullFlag.COMMIT_OFFSET, commit=1)
        assert await cluster.number(RequestCode.QUERY_CONSUMER_OFFSET, QueryConsumerOffsetRequest("g", "T", 0)) == 1

    run(scenario)


def test_a_pull_beyond_those_that_may_wait_is_refused_as_busy(run, monkeypatch):
    monkeypatch.setattr("rmqkit.broker.long_polling.HELD_MAX", 1)

    async def scenario(cluster):
        await cluster.send()
        flags = PullFlag.SUBSCRIPTION | PullFlag.SUSPEND
        waiting = asyncio.ensure_future(cluster.pull(1, flags=flags, suspend_ms=60_000))
        held = cluster.standalone._broker._parts.long_polling
        while not held.is_full:
            await asyncio.sleep(0)
        refused = await cluster.pull(1, flags=flags)
        assert (refused.code, refused.remark) == (2, "[OVERLOAD]system busy, start flow control for a while")
        await cluster.send()
        assert (await waiting).code == 0
        assert not held.is_full

    run(scenario)

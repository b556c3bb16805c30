"""Histograms, answers by code, and the text that is made of them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmqkit.metrics import Histogram, RpcLatency, exposition
from rmqkit.protocol.codes import RequestCode, ResponseCode

text_string_to_metric_families = pytest.importorskip("prometheus_client.parser").text_string_to_metric_families

TEXT = """\
# HELP rocketmq_message_size size of a record in bytes; a batch counts once, with the mean size
# TYPE rocketmq_message_size histogram
rocketmq_message_size_bucket{cluster="c",is_system="false",le="1.0",message_type="normal",topic="T\\"1"} 2.0
rocketmq_message_size_bucket{cluster="c",is_system="false",le="4.0",message_type="normal",topic="T\\"1"} 2.0
rocketmq_message_size_bucket{cluster="c",is_system="false",le="+Inf",message_type="normal",topic="T\\"1"} 3.0
rocketmq_message_size_count{cluster="c",is_system="false",message_type="normal",topic="T\\"1"} 3.0
rocketmq_message_size_sum{cluster="c",is_system="false",message_type="normal",topic="T\\"1"} 11.0
# HELP rocketmq_messages_in_total messages stored for producers; delayed messages count again when they are delivered
# TYPE rocketmq_messages_in_total counter
rocketmq_messages_in_total{cluster="c",is_system="true",message_type="delay",topic="S"} 7.0
"""


def test_the_text_is_prometheus_own():
    sizes = Histogram((1.0, 4.0))
    sizes.observe(1.0, 2)
    sizes.observe(9)
    gathered = {
        "rocketmq_messages_in_total": {("S", "delay", "true"): 7},
        "rocketmq_message_size": {('T"1', "normal", "false"): sizes},
        "rocketmq_half_messages": {},
    }
    assert exposition(gathered, {"cluster": "c"}).decode() == TEXT


@given(st.lists(st.floats(0, 10_000)), st.integers(1, 5))
def test_buckets_count_what_is_at_most_their_bound(values, count):
    bounds = (1.0, 10.0, 100.0)
    found = Histogram(bounds)
    for value in values:
        found.observe(value, count)
    text = exposition({"rocketmq_message_size": {("T", "normal", "false"): found}}, {}).decode()
    (family,) = text_string_to_metric_families(text)
    buckets = {float(sample.labels["le"]): sample.value for sample in family.samples if "le" in sample.labels}
    assert buckets == {bound: count * sum(value <= bound for value in values) for bound in (*bounds, math.inf)}
    assert found.sum == pytest.approx(count * sum(values))


@given(st.lists(st.tuples(st.sampled_from((0.0, 0.5, 1.0, 1.5, 10.0, 99.0, 1000.0)), st.integers(1, 5))))
def test_many_at_once_count_as_one_by_one(observed):
    each, once, alone = (Histogram((1.0, 10.0, 100.0)) for _ in range(3))
    for value, count in observed:
        alone.observe(value, count)
    each.observe_each([value for value, _ in observed], [count for _, count in observed])
    once.observe_all([value for value, count in observed for _ in range(count)])
    assert each.counts == once.counts == alone.counts
    assert each.sum == once.sum == alone.sum


def test_answers_have_names_and_only_held_pulls_are_long_polls():
    latency = RpcLatency()
    for code, is_held in ((RequestCode.PULL_MESSAGE, True), (RequestCode.SEND_MESSAGE_V2, True), (99_999, False)):
        latency[code, ResponseCode.SUCCESS, is_held, "success"].observe(2)
    latency[RequestCode.SEND_MESSAGE_V2, ResponseCode.SUCCESS, False, "success"].observe(2)
    counts = {key[1:]: sum(found.counts) for key, found in latency.gather().items()}
    assert counts == {
        ("pull_message", "success", "true", "success"): 1,
        ("send_message_v2", "success", "false", "success"): 2,
        ("99999", "success", "false", "success"): 1,
    }


def test_a_peer_that_invents_codes_makes_a_bounded_table():
    latency = RpcLatency()
    for code in range(100_000, 110_000):
        latency[code, ResponseCode.REQUEST_CODE_NOT_SUPPORTED, False, "success"].observe(1)
    assert len(latency) <= 2049
    assert sum(sum(found.counts) for found in latency.gather().values()) == 10_000
    others = latency.gather()["remoting", "other", "request_code_not_supported", "false", "success"]
    assert sum(others.counts) == 10_000 - 2048

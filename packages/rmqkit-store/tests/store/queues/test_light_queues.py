"""Light queues: behaviour.md §9.6, store.md §11; Apache's own are in the golden stores (`test_golden_rebuild`)."""

from __future__ import annotations

import shutil

import pytest

from rmqkit.protocol.properties import find_property
from rmqkit.store import replica as replication
from rmqkit.store.light import light_fault, light_names, light_numbers
from rmqkit.store.message_store import PutStatus
from rmqkit.store.offline.rebuild import rebuild
from tests.store.stores import copy_store, message, opened, put_all, read_all, small_settings

A, B = "%LMQ%a", "%LMQ%b"
LIGHT = small_settings(enable_light_queues=True, enable_multi_dispatch=True)


def light(*names, topic="TopicTest", **properties):
    return message(topic, INNER_MULTI_DISPATCH=",".join(names), **properties)


def numbers(store, topic):
    return [find_property(record.properties, b"INNER_MULTI_QUEUE_OFFSET") for record in read_all(store, topic)]


@pytest.mark.parametrize(
    ("topic", "listed", "names"),
    [
        ("T", b"%LMQ%a,%LMQ%b", [A, B]),
        ("T", b"%LMQ%a,,", [A]),
        ("T", b" ", []),
        ("%RETRY%g", b"%LMQ%a", []),
        ("rmq_sys_X", b"%LMQ%a", []),
        ("SCHEDULE_TOPIC_XXXX", b"%LMQ%a", []),
    ],
)
def test_what_a_message_requests(topic, listed, names):
    assert light_names(topic, b"INNER_MULTI_DISPATCH\x01%b\x02" % listed) == names


def test_only_whole_numbers_of_light_queues_count():
    properties = b"INNER_MULTI_DISPATCH\x01%%LMQ%%a,%%LMQ%%b,plain\x02INNER_MULTI_QUEUE_OFFSET\x01%b\x02"
    assert light_numbers("T", properties % b"3,,7") == {A: 3}
    assert light_numbers("T", properties % b"3,4") == {}
    assert [bool(light_fault([name], "T")) for name in (A, "plain", "%LMQ%a/b")] == [False, True, True]


def test_messages_are_numbered_read_and_reported_of_in_every_queue(tmp_path):
    told = []
    with opened(tmp_path, LIGHT, on_arrival=told.extend) as store:
        messages = light(A, B), light(B), message(), light(A, topic="Other"), light(A, INNER_MULTI_QUEUE_OFFSET="77")
        with store.batch():
            put_all(store, *messages)
        assert store.put_run([light(B), light(B)]) is None
        assert numbers(store, "TopicTest") == [b"0,0", b"1", None, b"2"]
        assert [(one.topic, one.queue_offset) for one in read_all(store, A)] == [
            ("TopicTest", 0),
            ("Other", 0),
            ("TopicTest", 3),
        ]
        assert [(one.topic, one.queue_offset) for one in told if one.topic == B] == [(B, 0), (B, 1)]


def test_without_the_settings_they_are_ordinary_messages(tmp_path):
    with opened(tmp_path, small_settings()) as store:
        put_all(store, light(A), light("plain"))
        assert (numbers(store, "TopicTest"), store.topics) == ([None, None], {"TopicTest"})


def test_what_cannot_be_kept_is_refused(tmp_path):
    settings = small_settings(enable_light_queues=True, enable_multi_dispatch=True, light_queue_count_max=2)
    with opened(tmp_path, settings) as store:
        put_all(store, light(A, B))
        assert store.put(light("plain", A)).status is PutStatus.MESSAGE_ILLEGAL
        assert store.put(light("%LMQ%c")).status is PutStatus.LIGHT_QUEUES_EXCEEDED
        assert store.put(light(*[A] * 5000)).status is PutStatus.PROPERTIES_SIZE_EXCEEDED
        put_all(store, light(B))
        assert numbers(store, "TopicTest") == [b"0,0", b"1"]


def test_without_the_quota_the_number_of_light_queues_has_no_limit(tmp_path):
    limits = {"limits_light_queues": False, "light_queue_count_max": 1}
    with opened(tmp_path, small_settings(enable_light_queues=True, enable_multi_dispatch=True, **limits)) as store:
        put_all(store, light(A, B), light("%LMQ%c"))
        assert store.topics == {"TopicTest", A, B, "%LMQ%c"}


@pytest.mark.parametrize("lost", ["nothing", "light queues", "all queues", "rebuilt"])
def test_they_come_back_after_a_crash(tmp_path, lost):
    with opened(tmp_path / "s", LIGHT) as store:
        put_all(store, *(light(*[A, B][: 1 + i % 2], body=bytes(100), TAGS="t") for i in range(60)))
        crashed = copy_store(tmp_path / "s", tmp_path / "crashed")
        (crashed / "lock").unlink(missing_ok=True)
    queues = crashed / "consumequeue"
    if lost == "light queues":
        shutil.rmtree(queues / A)
    elif lost == "all queues":
        shutil.rmtree(queues)
    elif lost == "rebuilt":
        shutil.rmtree(queues)
        rebuild(crashed, LIGHT, queues=True, index=False)
    with opened(crashed, LIGHT) as store:
        assert [len(read_all(store, topic)) for topic in ("TopicTest", A, B)] == [60, 60, 30]
        assert [one.queue_offset for one in read_all(store, B)] == list(range(1, 60, 2))
        put_all(store, light(A, B))
        assert numbers(store, "TopicTest")[-1] == b"60,30"


def test_expired_entries_go(tmp_path):
    with opened(tmp_path, LIGHT) as store:
        put_all(store, *(light(A, body=bytes(300)) for _ in range(60)))
    (tmp_path / "commitlog" / ("0" * 20)).unlink()
    with opened(tmp_path, LIGHT) as store:
        assert store.min_offset(A, 0) == store.min_offset("TopicTest", 0) > 0
        assert len(read_all(store, A)) == 60 - store.min_offset(A, 0)


@pytest.mark.parametrize("bulk_from_bytes", [1, 1 << 40], ids=["bulk", "one by one"])
def test_a_slave_reports_every_light_queue_and_reads_numbers_once(tmp_path, monkeypatch, bulk_from_bytes):
    monkeypatch.setattr(replication, "_BULK_FROM_BYTES", bulk_from_bytes)
    settings = small_settings(enable_light_queues=True, enable_multi_dispatch=True, commit_log_file_bytes=1 << 20)
    with opened(tmp_path / "master", settings) as master:
        put_all(master, *(light(f"%LMQ%{i % 40}") for i in range(80)), message())
        log = bytes(master.log_part(0, 1 << 20))
    told, read = [], []

    def counted(topic, properties):
        read.append(topic)
        return light_numbers(topic, properties)

    for module in ("dispatcher", "bulk"):
        monkeypatch.setattr(f"rmqkit.store.{module}.light_numbers", counted, raising=False)
    with opened(tmp_path / "slave", settings, is_replica=True, on_arrival=told.extend) as slave:
        slave.replica.append(0, log)
        while slave.dispatch():
            pass
        newest = {one.topic: one.queue_offset for one in told if one.topic.startswith("%LMQ%")}
        assert newest == {f"%LMQ%{i}": 1 for i in range(40)}
        assert len(read) <= 81

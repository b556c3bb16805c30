"""Clusters of the fixtures: slaves, restarts, settings, time, and that nothing is left of a hundred."""

from __future__ import annotations

import gc
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest

from rmqkit import ConsumeLater, Message, SendFailed, SettingsError, sync
from rmqkit.broker.settings import STANDALONE, BrokerSettings
from rmqkit.protocol.names import TIMER_TOPIC
from rmqkit.protocol.schemas.access import UserInfo
from rmqkit.remoting.address import split_address
from rmqkit.remoting.authentication import Credentials
from rmqkit.settings import load
from rmqkit.testing import LocalCluster
from rmqkit.testing.cluster import _hold_port
from tests.interop.server_process import wait_until
from tests.patience import producing
from tests.sources import ROOT
from tests.waiting import SECONDS

BROKERS, AT_A_TIME = 100, 8
GROWTH_MIB_MAX = 40


@pytest.mark.rmq(brokers=2, slaves=1, settings={"defaultTopicQueueNums": 2, "slaveReadEnable": True})
def test_a_marker_says_how_many_brokers_and_slaves(rmq_cluster, rmq_topic, rmq_producer):
    assert [(one.name, one.is_slave) for one in (*rmq_cluster.brokers, *rmq_cluster.slaves)] == [
        ("broker-0", False),
        ("broker-1", False),
        ("broker-0", True),
        ("broker-1", True),
    ]
    for number in range(8):
        rmq_producer.send(Message(topic=rmq_topic, body=b"%d" % number))
    for master, slave in zip(rmq_cluster.brokers, rmq_cluster.slaves, strict=True):
        ends = partial(end_of_log, rmq_cluster, slave), end_of_log(rmq_cluster, master)
        assert ends[1] > 0
        wait_until(lambda ends=ends: ends[0]() == ends[1], SECONDS, "the copy")
    rmq_cluster.brokers[0].stop()
    assert rmq_cluster.brokers[0].address == "" and len(rmq_cluster.look(rmq_cluster.masters)) == 1


def test_a_broker_comes_back_on_its_port_with_its_messages(
    rmq_broker, rmq_topic, rmq_group, rmq_consumer, rmq_producer
):
    broker, seen = rmq_broker.brokers[0], []
    rmq_producer.send(Message(topic=rmq_topic, body=b"1"))
    address = broker.address
    broker.stop()
    broker.stop()
    broker.start()
    assert broker.address == address
    rmq_consumer.subscribe(rmq_topic, handler=lambda message: seen.append(message.body))
    rmq_broker.assert_consumed(rmq_group, rmq_topic, count=1)
    assert seen == [b"1"]


def test_nobody_else_gets_the_ports_of_a_broker_that_is_stopped(rmq_broker):
    broker = rmq_broker.brokers[0]
    host, port = split_address(broker.address)
    broker.stop()
    for taken in (port - 2, port, port + 1):
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind((host, taken))
    broker.start()
    assert broker.address == f"{host}:{port}"


def test_time_passes_for_servers_and_not_for_clients(rmq_broker, rmq_clock, rmq_topic, rmq_group, rmq_consumer):
    rmq_consumer.subscribe(rmq_topic, handler=lambda message: None)
    wait_until(lambda: rmq_broker.look(lambda: members(rmq_broker, rmq_group)), SECONDS, "a member")
    before_ms, liveness_ms = rmq_clock.now_ms(), rmq_clock.monotonic_ms()
    connections = rmq_broker.look(lambda: members(rmq_broker, rmq_group))
    rmq_clock.advance(days=1, hours=2, minutes=3, seconds=4, milliseconds=5)
    passed_ms = ((26 * 60 + 3) * 60 + 4) * 1000 + 5
    assert 0 <= rmq_clock.now_ms() - before_ms - passed_ms < SECONDS * 1000
    assert rmq_clock.monotonic_ms() - liveness_ms < SECONDS * 1000
    assert rmq_broker.look(lambda: members(rmq_broker, rmq_group)) == connections
    with sync.Producer("p", rmq_broker.name_server) as producer:
        result = producer.send(Message(topic=rmq_topic, body=b"1"))
        stored = rmq_broker.look(
            lambda: rmq_broker.masters()[0].store.store_time_at(rmq_topic, result.queue.queue_id, 0)
        )
    assert stored >= before_ms + passed_ms
    rmq_broker.assert_consumed(rmq_group, rmq_topic, count=1)
    with pytest.raises(SettingsError, match=r"^the clock cannot go back by 60 s: give a time that passes$"):
        rmq_clock.advance(minutes=-1)


def end_of_log(cluster, broker):
    return cluster.look(lambda: broker.context.store.max_physical_offset)


def members(cluster, group):
    return [*getattr(cluster.masters()[0].clients.all_consumers.get(group), "members", ())]


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"autoCreateTopics": True}, "settings: autoCreateTopics is unknown; did you mean autoCreateTopicEnable?"),
        ({"brokerPermission": 9}, "brokerPermission"),
    ],
)
def test_settings_are_those_of_a_broker_file(settings, text):
    with pytest.raises(SettingsError, match=text):
        LocalCluster(settings=settings)


USERS = {
    "authenticationEnabled": True,
    "authorizationEnabled": True,
    "initAuthenticationUser": {"username": "root", "password": "secret12"},
    "innerClientAuthenticationCredentials": {"accessKey": "inner", "secretKey": "inner-secret"},
}


@pytest.mark.rmq(slaves=1, settings=USERS)
def test_clients_of_the_fixtures_sign_and_others_are_refused(
    rmq_broker, rmq_topic, rmq_group, rmq_producer, rmq_consumer
):
    seen = []
    rmq_consumer.subscribe(rmq_topic, handler=lambda message: seen.append(message.body))
    rmq_producer.send(Message(topic=rmq_topic, body=b"1"))
    rmq_broker.assert_consumed(rmq_group, rmq_topic, count=1)
    assert seen == [b"1"]
    end = end_of_log(rmq_broker, rmq_broker.brokers[0])
    wait_until(lambda: end_of_log(rmq_broker, rmq_broker.slaves[0]) >= end, SECONDS, "the copy")
    anna = Credentials("anna", "secret12")
    access = rmq_broker.brokers[0].context.access
    rmq_broker.look(lambda: access.create_user("anna", UserInfo(password="secret12")))
    for user, remark in ((None, "username cannot be null"), (anna, "no matched policies")):
        with (
            sync.Producer("p", rmq_broker.name_server, settings=producing(auth=user)) as producer,
            pytest.raises(SendFailed, match=remark),
        ):
            producer.send(Message(topic=rmq_topic, body=b"2"))


def test_a_held_port_is_nobody_elses_and_the_brokers():
    with _hold_port(0) as holder:
        port = holder.getsockname()[1]
        with pytest.raises(OSError, match="in use"):
            _hold_port(port)
        with socket.create_server(("127.0.0.1", port)) as server:
            assert server.getsockname()[1] == port


@pytest.mark.slow
def test_nothing_is_left_of_a_hundred_brokers():
    """In a process of its own: threads, files and memory of other tests come and go."""
    command = [sys.executable, "-c", "from tests.testing.test_cluster import a_hundred; a_hundred()"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def a_hundred():
    def send_one(number):
        with LocalCluster() as cluster:
            with sync.Producer("p", cluster.name_server, settings=producing()) as producer:
                producer.send(Message(topic="T", body=b"%d" % number))
            return cluster.look(lambda: cluster.masters()[0].store.queue_ends()), cluster.brokers[0].store_root

    def send(count):
        with ThreadPoolExecutor(AT_A_TIME) as pool:
            return list(pool.map(send_one, range(count)))

    send(AT_A_TIME)
    before = left()
    results = send(BROKERS)
    after = left()
    assert all(sum(ends.values()) == 1 for ends, _ in results)
    assert not any(root.exists() for _, root in results)
    assert after[:2] == before[:2]
    assert after[2] - before[2] < GROWTH_MIB_MAX


def left():
    """Threads, open files and MiB of memory of this process."""
    gc.collect()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return threading.active_count(), len([*Path("/proc/self/fd").iterdir()]), int(status["RssAnon"].split()[0]) / 1024


def test_the_brokers_of_tests_and_of_the_tutorial_have_the_same_defaults(rmq_broker, rmq_topic, rmq_producer):
    for key, value in STANDALONE.items():
        (settings,) = load([BrokerSettings], {key: value}).values
        (usual,) = load([BrokerSettings], {}).values
        own = rmq_broker.brokers[0].context.settings
        changed = [
            name
            for name in settings.__struct_fields__
            if getattr(settings, name) != getattr(usual, name) and not name.endswith("_addresses")
        ]
        assert changed and all(getattr(own, name) == getattr(settings, name) for name in changed)
    sent = rmq_producer.send(Message(topic=rmq_topic, body=b"x", delay=3600))
    assert rmq_producer.recall(sent.recall_handle) == sent.msg_id


def test_a_program_can_follow_the_time_of_the_servers(
    rmq_broker, rmq_clock, rmq_topic, rmq_group, rmq_producer, rmq_consumer, monkeypatch
):
    seen = []
    rmq_consumer.subscribe(rmq_topic, handler=seen.append)
    rmq_clock.advance(hours=10)
    before = time.time()
    monkeypatch.setattr("time.time", rmq_clock.now)
    assert time.time() - before > 36_000 - 1
    rmq_producer.send(Message(topic=rmq_topic, body=b"x", deliver_at=(int(time.time() * 1000) + 7_200_000) / 1000))
    rmq_clock.advance(hours=1)
    assert not seen, "it is not due yet"
    rmq_clock.advance(hours=1, seconds=2)
    wait_until(lambda: len(seen) == 1, SECONDS, "the delivery")


def test_a_handler_has_a_message_again_after_the_time_that_it_chose(
    rmq_broker, rmq_clock, rmq_topic, rmq_producer, rmq_consumer
):
    tries = []

    def fails_twice(message):
        tries.append(message)
        if len(tries) < 3:
            raise ConsumeLater(delay=timedelta(minutes=len(tries), seconds=7))

    rmq_consumer.subscribe(rmq_topic, handler=fails_twice)
    rmq_producer.send(rmq_topic, b"x", tags="a")
    wait_until(lambda: len(tries) == 1, SECONDS, "the first try")
    stored = partial(rmq_broker.look, lambda: rmq_broker.masters()[0].store.max_offset(TIMER_TOPIC, 0))
    for seconds, number in ((67, 2), (127, 3)):
        wait_until(lambda number=number: stored() == number - 1, SECONDS, "the broker's timer has it")
        rmq_clock.advance(seconds=seconds - 40)  # the clock also runs by itself while the machine is slow
        assert len(tries) == number - 1, "it is not due yet"
        rmq_clock.advance(seconds=42)
        wait_until(lambda number=number: len(tries) == number, SECONDS, f"try {number}")
    assert [(one.topic, one.tags, one.reconsume_times) for one in tries] == [(rmq_topic, "a", n) for n in range(3)]
    assert len({one.msg_id for one in tries}) == 1

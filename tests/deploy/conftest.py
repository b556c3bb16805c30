"""A shard of deploy/compose/cluster.yaml, run here: a name server, a master and its slave, under some load."""

from __future__ import annotations

import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field

import pytest

from rmqkit import Message, TransactionState, sync
from tests.deploy.compose import CLUSTER, environment, words
from tests.deploy.pods import SECONDS_MAX, Pod, pods
from tests.interop.server_process import wait_until
from tests.patience import producing, pushing

SERVICES = ("namesrv-a", "broker-a-master", "broker-a-slave")


@dataclass(slots=True)
class Shard:
    """A running shard. ``pages``: the metrics of every service, three times: before, between and after the work."""

    pods: dict[str, Pod]
    sent: list[str] = field(default_factory=list)
    pages: list[dict[str, str]] = field(default_factory=list)

    @property
    def name_server(self) -> str:
        return self.pods["namesrv-a"].address

    def page(self, service: str) -> str:
        address = self.pods[service].metrics
        return urllib.request.urlopen(f"http://{address}/metrics", timeout=SECONDS_MAX).read().decode()

    def read(self) -> None:
        self.pages.append({service: self.page(service) for service in self.pods})

    def wait(self, service: str, what: str, holds: Callable[[str], bool]) -> None:
        wait_until(
            lambda: holds(self.page(service)), SECONDS_MAX, f"{what} in the metrics of {service}", poll_seconds=0.1
        )


@pytest.fixture(scope="session")
def shard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shard]:
    with ExitStack() as stack:
        start = stack.enter_context(pods(tmp_path_factory.mktemp("compose")))
        running: dict[str, Pod] = {}
        more = {"metricsPromExporterPort": "0"}
        for service in SERVICES:
            if running:
                more |= {"namesrvAddr": running["namesrv-a"].address, "haListenPort": "0", "grpcServerPort": "-1"}
                more |= {"mappedFileSizeCommitLog": "1048576"}
            environ = environment(CLUSTER["services"][service], HOST_IP="127.0.0.1")
            running[service] = start(service, words(CLUSTER["services"][service]), {}, {}, environ, **more)
        shard = Shard(running)
        shard.wait(
            "broker-a-master", "a slave in sync", lambda page: " 1.0" in line(page, "rmqkit_replication_in_sync{")
        )
        shard.read()
        work(shard)
        yield shard


def work(shard: Shard) -> None:
    """Cause changes of every metric: messages, timed messages, transactions, dead letters, a lag."""
    at, is_over = shard.name_server, threading.Event()

    def fail(message: object) -> None:
        raise ValueError("not this one")

    with ExitStack() as stack:
        producer = stack.enter_context(sync.Producer("shop", at, settings=producing()))
        for number in range(20):
            shard.sent.append(producer.send(Message(topic="Orders", body=b"%d" % number)).status.name)
        producer.send(Message(topic="Orders", body=b"later", delay=3600))
        transactions = stack.enter_context(
            sync.TransactionProducer(
                "bank",
                at,
                execute=lambda message, state: state,
                check=lambda message: TransactionState.UNKNOWN,
                settings=producing(),
            )
        )
        for state in TransactionState:
            transactions.send_in_transaction(Message(topic="Orders", body=b"paid"), state)
        for group, handler, settings in (
            ("broken", fail, pushing(retries_max=0)),
            ("slow", lambda message: is_over.wait(SECONDS_MAX), pushing()),
        ):
            consumer = stack.enter_context(sync.PushConsumer(group, at, settings=settings))
            consumer.subscribe("Orders", handler=handler)
        stack.callback(is_over.set)
        for name in (
            "rocketmq_send_to_dlq_messages_total",
            "rocketmq_timing_messages",
            "rocketmq_commit_messages_total",
            "rocketmq_rollback_messages_total",
            "rocketmq_consumer_lag_messages",
        ):
            shard.wait("broker-a-master", name, lambda page, name=name: bool(line(page, f"{name}{{")))
        shard.read()
        producer.send(Message(topic="Orders", body=b"one more"))
        shard.read()


def line(page: str, beginning: str) -> str:
    """Return the first line with this prefix, or an empty string."""
    return next((one for one in page.splitlines() if one.startswith(beginning)), "")

"""kombu's connections and Celery's workers over our own broker, with their own releases."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from datetime import UTC, datetime
from queue import Empty

import kombu
import pytest
from celery import Celery
from celery.utils.time import maybe_iso8601, maybe_make_aware
from kombu.exceptions import OperationalError

from rmqkit.clock import SYSTEM_CLOCK
from rmqkit.errors import NoRoute
from rmqkit.kombu.transport import _FULL_SECONDS, DELAY_MS_MAX, Channel, Transport, topic_of
from rmqkit.protocol.message import Message
from rmqkit.remoting.authentication import Credentials
from tests.client.messages import received
from tests.client.peers import standalone
from tests.sources import ROOT

SECONDS_MAX = 200
HOUR_MS = 3_600_000


@pytest.fixture
def url(tmp_path):
    with standalone(tmp_path) as address:
        yield f"rocketmq://{address}//"


def connect(url: str, **options) -> kombu.Connection:
    return kombu.Connection(url, transport_options={"wait_seconds": 0.2, **options})


@pytest.mark.parametrize(
    ("queue", "topic"),
    [("celery", "celery"), ("shop.orders", "shop%2Eorders"), ("a b", "a%20b"), ("ö", "%C3%B6"), ("a_B-9", "a_B-9")],
)
def test_a_queue_is_a_topic(queue, topic):
    assert topic_of(queue) == topic


@pytest.mark.parametrize(
    "code",
    [
        "import celery; print(type(celery.Celery(broker='rocketmq://h:1//').connection_for_read().transport))",
        "import kombu, rmqkit.kombu; print(type(kombu.Connection('rocketmq://h:1//').transport))",
    ],
    ids=["Celery", "kombu"],
)
def test_the_scheme_is_known_to_celery_by_itself_and_to_kombu_by_an_import(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=SECONDS_MAX)
    assert done.stdout.strip() == f"<class '{Transport.__module__}.Transport'>"


def test_messages_go_in_and_come_out(url):
    with connect(url) as connection, contextlib.closing(connection.SimpleQueue("shop.orders")) as queue:
        queue.put({"id": 17}, headers={"a": "b"})
        message = queue.get(timeout=SECONDS_MAX)
        assert (message.payload, message.headers["a"]) == ({"id": 17}, "b")
        message.ack()


def test_what_was_not_acknowledged_is_redelivered_when_the_connection_closes(url):
    with connect(url) as connection, contextlib.closing(connection.SimpleQueue("orders")) as queue:
        queue.put("x")
        queue.get(timeout=SECONDS_MAX)
    with connect(url) as connection, contextlib.closing(connection.SimpleQueue("orders")) as queue:
        message = queue.get(timeout=SECONDS_MAX)
        assert message.payload == "x"
        message.ack()


def test_what_its_consumer_lost_is_redelivered_after_the_visibility_timeout(url):
    with connect(url, visibility_timeout=0.5) as lost, contextlib.closing(lost.SimpleQueue("orders")) as queue:
        queue.put("x")
        first = queue.get(timeout=SECONDS_MAX)
        with connect(url) as connection, contextlib.closing(connection.SimpleQueue("orders")) as other:
            second = other.get(timeout=SECONDS_MAX)
            assert second.payload == first.payload
            second.ack()


def test_a_message_may_be_had_again_or_not(url):
    with connect(url) as connection, contextlib.closing(connection.SimpleQueue("orders")) as queue:
        queue.put("x")
        queue.get(timeout=SECONDS_MAX).requeue()
        queue.get(timeout=SECONDS_MAX).reject()


def test_a_queue_can_be_emptied(url):
    with connect(url) as connection:
        channel = connection.channel()
        assert channel.queue_purge("orders") == 0
        with contextlib.closing(connection.SimpleQueue("orders")) as queue:
            for number in range(50):
                queue.put(number)
        assert channel.queue_purge("orders") == 50


def test_no_more_come_than_are_prefetched(url):
    got = []
    with connect(url) as connection:
        channel = connection.channel()
        queues = [kombu.Queue(name, kombu.Exchange("shop"), routing_key=name, channel=channel) for name in ("a", "b")]
        with connection.Producer(channel) as producer:
            for number in range(10):
                name = "ab"[number % 2]
                producer.publish(number, exchange=queues[0].exchange, routing_key=name, declare=queues)
        channel.basic_qos(0, 3, False)
        with connection.Consumer(queues, callbacks=[lambda body, message: got.append(message)], channel=channel):
            while len(got) < 3:
                connection.drain_events(timeout=SECONDS_MAX)
            with pytest.raises(TimeoutError):
                connection.drain_events(timeout=0.1)
            assert len(got) == 3
            done = 0
            while done < 10:
                got[done].ack()
                done += 1
                while len(got) < min(10, done + 3):
                    connection.drain_events(timeout=SECONDS_MAX)
        assert sorted(message.payload for message in got) == list(range(10))


def test_messages_of_consumers_without_acknowledgements_are_acknowledged(url):
    got = []
    with connect(url) as connection:
        with contextlib.closing(connection.SimpleQueue("orders")) as queue:
            queue.put("x")
        with connection.Consumer(
            [kombu.Queue("orders")], callbacks=[lambda body, message: got.append(body)], no_ack=True
        ):
            connection.drain_events(timeout=SECONDS_MAX)
    assert got == ["x"]


def test_a_queue_may_be_consumed_with_acknowledgements_after_it_was_without(url):
    with connect(url) as connection:
        with connection.Consumer([kombu.Queue("orders")], no_ack=True):
            pass
        with contextlib.closing(connection.SimpleQueue("orders")) as queue:
            queue.put("x")
            queue.get(timeout=SECONDS_MAX)
    with connect(url) as connection, contextlib.closing(connection.SimpleQueue("orders")) as queue:
        assert queue.get(timeout=SECONDS_MAX).payload == "x"


def test_without_a_name_server_a_connection_fails_as_kombu_expects():
    with connect("rocketmq://127.0.0.1:1//") as connection, pytest.raises(OperationalError):
        connection.ensure_connection(max_retries=1, interval_start=0, interval_step=0)


def test_the_url_may_have_a_user():
    connection = kombu.Connection("rocketmq://me:secret@shop:9999//", transport_options={"name_servers": None})
    made = connection.transport
    assert (made.name_servers, made.credentials) == ("shop:9999", Credentials("me", "secret"))
    several = kombu.Connection("rocketmq://", transport_options={"name_servers": "a:1;b:2"}).transport
    assert (several.name_servers, several.credentials) == ("a:1;b:2", None)


class Wire:
    """Stands for a transport's producer and consumer: writes down what is sent and acknowledged."""

    def __init__(self, *messages) -> None:
        self.sent: list[Message] = []
        self.acknowledged, self.given_back, self.messages = [], [], list(messages)
        self.producer = self.consumer = self
        self.delivered, self.no_ack_queues = [], set()
        self.client = kombu.Connection("rocketmq://127.0.0.1:1//")
        self._used_channel_ids, self.channel_max, self._callbacks = [], 1, {}

    def _deliver(self, payload, queue) -> None:
        self.delivered.append((payload, queue))

    def send(self, message: Message) -> None:
        self.sent.append(message)

    def ack(self, message) -> None:
        self.acknowledged.append(message)

    def change_invisible_time(self, message, invisible_ms: int) -> None:
        self.given_back.append(message)

    def pop(self, topic, **options):
        if not self.messages:
            raise NoRoute("no topic")
        return self.messages

    visibility_ms, wait_seconds = 1000, 0.0


def channel_over(wire: Wire) -> Channel:
    channel = Channel(wire)
    channel.closed = True
    return channel


PAYLOAD = b'{"body": "", "headers": {}, "properties": {"delivery_info": {}}}'
ENDS = {
    "acknowledged": (lambda channel, tag: channel.basic_ack(tag), "acknowledged"),
    "rejected": (lambda channel, tag: channel.basic_reject(tag), "acknowledged"),
    "rejected to be had again": (lambda channel, tag: channel.basic_reject(tag, requeue=True), "given back"),
    "recovered": (lambda channel, tag: channel.basic_recover(requeue=True), "given back"),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_message_is_acknowledged_or_given_back_once(end):
    act, outcome = ENDS[end]
    wire = Wire(received(1, PAYLOAD))
    channel = channel_over(wire)
    message = channel.basic_get("orders")
    assert (wire.acknowledged, wire.given_back) == ([], [])
    act(channel, message.delivery_tag)
    channel.qos.restore_unacked_once()  # as its end does
    kept = {"acknowledged": wire.acknowledged, "given back": wire.given_back}
    assert kept.pop(outcome) == wire.messages
    assert list(kept.values()) == [[]]


def test_a_message_that_is_had_without_acknowledgement_is_acknowledged_at_once():
    wire = Wire(received(1, PAYLOAD))
    assert channel_over(wire).basic_get("orders", no_ack=True) is not None
    assert wire.acknowledged == wire.messages


@pytest.mark.parametrize("no_ack", [True, False])
def test_what_a_consumer_without_acknowledgements_gets_is_acknowledged_when_it_is_delivered(no_ack):
    wire = Wire(received(1, PAYLOAD))
    wire.no_ack_queues = {"orders"} if no_ack else set()
    channel_over(wire)._get_many(["orders"])
    assert len(wire.delivered) == 1
    assert wire.acknowledged == (wire.messages if no_ack else [])


def in_ms(milliseconds: int, *, zone: bool = True) -> str:
    due = datetime.fromtimestamp((SYSTEM_CLOCK.now_ms() + milliseconds) / 1000, UTC)
    return due.isoformat() if zone else due.replace(tzinfo=None).isoformat()


@pytest.mark.parametrize(
    ("eta", "delay_ms"),
    [
        (lambda: None, None),
        (lambda: "soon", None),
        (lambda: in_ms(-HOUR_MS), None),
        (lambda: in_ms(10 * HOUR_MS), 10 * HOUR_MS),
        (lambda: in_ms(10 * HOUR_MS, zone=False), 10 * HOUR_MS),
        (lambda: in_ms(1000 * HOUR_MS), DELAY_MS_MAX),
    ],
    ids=["none", "illegal", "past", "later", "without a zone", "beyond what brokers take"],
)
def test_a_task_with_a_time_is_a_timed_message(eta, delay_ms):
    wire = Wire()
    channel_over(wire)._put("orders", {"body": "", "headers": {"id": "task-17", "eta": eta()}})
    (sent,) = wire.sent
    assert (sent.topic, sent.keys) == ("orders", ["task-17"])
    if delay_ms is None:
        assert sent.deliver_at is None
    else:
        assert sent.deliver_at is not None
        assert abs(sent.deliver_at * 1000 - SYSTEM_CLOCK.now_ms() - delay_ms) < 10 * 60_000


@pytest.mark.parametrize(("zone", "enable_utc"), [("UTC", True), ("Asia/Shanghai", False), ("America/New_York", True)])
def test_a_time_without_a_zone_is_the_one_that_celery_reads_whatever_zone_it_is_set_to(zone, enable_utc):
    app = Celery(set_as_current=False)
    app.conf.update(timezone=zone, enable_utc=enable_utc)
    naive = datetime.fromisoformat(in_ms(10 * HOUR_MS, zone=False)).replace(microsecond=0)
    headers = app.amqp.as_task_v2("task-17", "tasks.add", eta=naive).headers
    wire = Wire()
    channel_over(wire)._put("orders", {"body": "", "headers": headers})
    # As `celery.worker.request.Request` reads the header.
    due = maybe_make_aware(maybe_iso8601(headers["eta"]), app.timezone)
    assert wire.sent[0].deliver_at == due.timestamp()


def test_a_task_that_comes_before_its_time_is_put_aside_again():
    body = b'{"body": "", "headers": {"eta": "%s"}, "properties": {}}' % in_ms(100 * HOUR_MS).encode()
    wire = Wire(received(1, body))
    assert channel_over(wire)._pop("orders", 1, 0.0) == []
    assert wire.acknowledged == wire.messages
    assert len(wire.sent) == 1


def full_transport(monkeypatch) -> tuple[Transport, list[float]]:
    """A transport whose only channel has as many messages as it may have, and how long it slept."""
    slept: list[float] = []
    monkeypatch.setattr("rmqkit.kombu.transport.time.sleep", slept.append)
    transport = Transport(kombu.Connection("rocketmq://127.0.0.1:1//"))
    channel = channel_over(Wire(received(1, PAYLOAD)))
    channel.qos.prefetch_count = 1
    channel.basic_consume("orders", no_ack=False, callback=print, consumer_tag="c")
    channel.basic_get("orders")
    assert not channel.qos.can_consume()
    transport.channels = [None, channel]
    return transport, slept


def test_a_worker_with_all_it_may_have_waits_shortly_and_may_then_acknowledge(monkeypatch):
    transport, slept = full_transport(monkeypatch)
    for timeout in (2.0, 0.01):
        with pytest.raises(TimeoutError):
            transport.drain_events(None, timeout)
    assert slept == [_FULL_SECONDS, 0.01]


def test_a_worker_without_a_time_limit_waits_until_there_is_room(monkeypatch):
    transport, slept = full_transport(monkeypatch)
    channel = transport.channels[1]

    def acknowledge(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            channel.qos.prefetch_count = 0

    monkeypatch.setattr("rmqkit.kombu.transport.time.sleep", acknowledge)
    monkeypatch.setattr(transport.cycle, "get", lambda callback, timeout: slept.append(-1.0))
    transport.drain_events(None)
    assert slept == [_FULL_SECONDS] * 3 + [-1.0]


def test_a_queue_without_a_topic_is_empty():
    with pytest.raises(Empty):
        channel_over(Wire())._get("orders")


# -- Celery


@contextlib.contextmanager
def worker(url: str, *arguments: str, **environment: str):
    command = [sys.executable, "-m", "celery", "-A", "tests.frameworks.celery_app", "worker", "-c", "1", "-l", "INFO"]
    own = {**os.environ, "BROKER_URL": url, "PYTHONUNBUFFERED": "1", **environment}
    with subprocess.Popen(
        [*command, *arguments], cwd=ROOT, env=own, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def until_line(process: subprocess.Popen, *texts: str) -> list[str]:
    """Read what a worker says until each text was in a line."""
    said: list[str] = []
    missing = list(texts)
    for line in process.stdout:
        said.append(line)
        missing = [text for text in missing if text not in line]
        if not missing:
            return said
    raise AssertionError(f"{missing} not in:\n{''.join(said)}")


def call(url: str, task: str, *arguments: object) -> None:
    from celery import Celery

    with Celery("caller", broker=url, set_as_current=False) as app:
        app.send_task(f"tests.frameworks.celery_app.{task}", arguments, ignore_result=True)


def test_a_celery_worker_runs_unchanged(url):
    call(url, "bill", 17)  # before there is a worker
    with worker(url) as process:
        until_line(process, "billed 17", "shipped 17")
        call(url, "flaky", 18)
        until_line(process, "try 0 of 18", "try 1 of 18", "try 2 of 18")
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=SECONDS_MAX)
        assert process.returncode == 0, said


@pytest.mark.faults
@pytest.mark.slow
def test_a_task_of_a_killed_worker_is_done_by_another(url):
    call(url, "deadly", 17)
    with worker(url, VISIBILITY="2", DEADLY="1") as process:
        assert process.wait(SECONDS_MAX) == -signal.SIGKILL
    with worker(url) as process:
        until_line(process, "survived 17")
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=SECONDS_MAX)
        assert process.returncode == 0

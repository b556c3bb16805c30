"""Deduplication: a handled message is not handled again."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sqlite3
import subprocess
import sys
import threading

import fakeredis
import msgspec
import pytest
import redis.exceptions

from rmqkit import sync
from rmqkit.client.consumer.consume import ConsumeLater
from rmqkit.client.consumer.dedupe import RedisDedupe, SqliteDedupe
from rmqkit.client.consumer.push import PushConsumer
from rmqkit.client.observe.hooks import Hook
from rmqkit.client.pop.consumer import PopConsumer
from rmqkit.client.producer.producer import Producer
from rmqkit.client.runtime.settings import MessageModel, PushConsumerSettings, StartFrom
from rmqkit.errors import ClientError, SettingsError
from rmqkit.protocol.message import Message
from rmqkit.standalone import Standalone
from tests.client.messages import received
from tests.client.peers import standalone, until
from tests.sources import ROOT

QUICK = PushConsumerSettings(take_over_pause_ms=0, start_from=StartFrom.FIRST_OFFSET)
HOUR_MS = 3_600_000


class Order(msgspec.Struct):
    id: int


class Clock:
    at_ms = 1_700_000_000_000

    def now_ms(self) -> int:
        return self.at_ms

    def monotonic_ms(self) -> float:
        return float(self.at_ms)


def keys(path) -> list[tuple]:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        return connection.execute("SELECT consumer_group, topic, key FROM rmqkit_seen ORDER BY key").fetchall()


def bills(path) -> list[int]:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        return [number for (number,) in connection.execute("SELECT id FROM bills ORDER BY id")]


@pytest.fixture
def database(tmp_path):
    path = tmp_path / "orders.db"
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE bills (id INTEGER)")
    return path


def billing(dedupe: SqliteDedupe, *fail: bytes):
    """A handler that writes a bill for each message, and then fails for some."""

    def bill(message) -> None:
        dedupe.connection.execute("INSERT INTO bills VALUES (?)", (int(message.body),))
        if message.body in fail:
            raise ValueError("no stock")

    return dedupe.once(bill, "G")


# -- SQLite


def test_a_message_that_comes_twice_has_its_effect_once(database):
    call = billing(SqliteDedupe(database))
    for message in (received(1, b"1"), received(2, b"2"), received(1, b"1")):
        call(message, message)
    assert bills(database) == [1, 2]
    assert keys(database) == [("G", "T", "id-1"), ("G", "T", "id-2")]


def test_a_handler_that_fails_leaves_neither_effect_nor_key(database):
    dedupe = SqliteDedupe(database)
    message = received(1, b"1")
    with pytest.raises(ValueError, match="no stock"):
        billing(dedupe, b"1")(message, message)
    assert bills(database) == []
    billing(dedupe)(message, message)
    assert bills(database) == [1]


def test_groups_and_topics_have_keys_of_their_own(database):
    dedupe = SqliteDedupe(database)
    called = []
    for group, topic in (("A", "T"), ("B", "T"), ("A", "U"), ("A", "T")):
        message = received(1, topic=topic)
        dedupe.once(called.append, group)(message, message)
    assert len(called) == 3


def test_a_key_of_the_program_distinguishes_messages(database):
    dedupe = SqliteDedupe(database, key=lambda message: message.keys[0])
    called = []
    for offset, key in ((1, "a"), (2, "b"), (3, "a")):
        message = received(offset, properties={"KEYS": key})
        dedupe.once(called.append, "G")(message, message)
    assert [message.queue_offset for message in called] == [1, 2]


@pytest.mark.parametrize("key", [None, "", 17])
def test_a_key_that_is_no_text_fails_the_message(database, key):
    message = received(1)
    with pytest.raises(ClientError, match=f"key of message id-1 is {key!r}: it must be text, and not empty"):
        SqliteDedupe(database, key=lambda message: key).once(print, "G")(message, message)


def test_keys_expire_and_what_comes_later_is_handled_again(database):
    clock = Clock()
    dedupe = SqliteDedupe(database, keep_hours=1, clock=clock)
    called = []
    call = dedupe.once(called.append, "G")
    for passed_ms in (0, HOUR_MS, HOUR_MS + 1):
        clock.at_ms = Clock.at_ms + passed_ms
        call(received(1), passed_ms)
    assert called == [0, HOUR_MS + 1]
    clock.at_ms += 2 * HOUR_MS
    call(received(2), "later")
    assert keys(database) == [("G", "T", "id-2")]


def test_the_table_does_not_grow_when_many_keys_expire_at_once(database):
    clock = Clock()
    call = SqliteDedupe(database, keep_hours=1, clock=clock).once(lambda message: None, "G")
    for offset in range(250):
        call(received(offset), None)
    clock.at_ms += 2 * HOUR_MS
    for offset in range(1000, 1004):
        call(received(offset), None)
    assert len(keys(database)) == 4


def test_two_deliveries_at_the_same_time_wait_for_each_other(database):
    dedupe = SqliteDedupe(database)
    begun, gate = threading.Event(), threading.Event()
    called = []

    def slow(number: int) -> None:
        called.append(number)
        begun.set()
        assert gate.wait(100)

    call = dedupe.once(slow, "G")
    threads = [threading.Thread(target=call, args=(received(1), number)) for number in range(2)]
    for thread in threads:
        thread.start()
        assert begun.wait(100)
    gate.set()
    for thread in threads:
        thread.join()
    assert called == [0]


def test_a_database_that_stays_locked_fails_the_message(database):
    call = SqliteDedupe(database, busy_seconds=0.01).once(print, "G")
    with contextlib.closing(sqlite3.connect(database, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            call(received(1), None)


def test_a_handler_that_commits_by_itself_is_reported(database):
    dedupe = SqliteDedupe(database)
    with pytest.raises(ClientError, match=r"the handler ended the transaction of .*orders.db: leave that"):
        dedupe.once(lambda message: dedupe.connection.execute("COMMIT"), "G")(received(1), None)


def test_the_connection_is_there_in_the_handler_only(database):
    dedupe = SqliteDedupe(database)
    with pytest.raises(ClientError, match=r"no transaction of .*orders.db here"):
        dedupe.connection  # noqa: B018 - the access is the test
    dedupe.once(lambda message: dedupe.connection.execute("SELECT 1"), "G")(received(1), None)
    with pytest.raises(ClientError):
        dedupe.connection  # noqa: B018


async def _async(message) -> None: ...


def test_what_sqlite_cannot_keep_is_refused(database):
    with pytest.raises(SettingsError, match="so the handler must be a plain function"):
        SqliteDedupe(database).once(_async, "G")
    with pytest.raises(SettingsError, match="forgets its keys"):
        SqliteDedupe(":memory:")
    with pytest.raises(SettingsError, match="keep_hours is 0: it must be positive"):
        SqliteDedupe(database, keep_hours=0)
    with pytest.raises(SettingsError, match="busy_seconds is -1: it must be positive"):
        SqliteDedupe(database, busy_seconds=-1)
    returned = asyncio.Future(loop=asyncio.new_event_loop())
    returned.get_loop().close()
    with pytest.raises(ClientError, match="returned an awaitable"):
        SqliteDedupe(database).once(lambda message: returned, "G")(received(1), None)


ONE_BY_ONE = PushConsumerSettings(take_over_pause_ms=0, start_from=StartFrom.FIRST_OFFSET, handlers_max=1)


@contextlib.asynccontextmanager
async def three_orders(tmp_path):
    """Store orders 1, 1 and 2 in one queue. The copy has the same unique key, as from a producer that retried."""
    async with Standalone(tmp_path / "store") as cluster, Producer("PG", cluster.namesrv_address) as producer:
        (queue, *_) = await producer.queues("Orders")
        sent = await producer.send(Message(topic="Orders", body=Order(1)), queue=queue)
        await producer.send(Message(topic="Orders", body=Order(1), msg_id=sent.msg_id), queue=queue)
        await producer.send(Message(topic="Orders", body=Order(2)), queue=queue)
        yield cluster.namesrv_address


@pytest.mark.parametrize("kind", [PushConsumer, PopConsumer])
async def test_a_message_that_is_stored_twice_is_billed_once(kind, tmp_path, database):
    async with three_orders(tmp_path) as address:
        orders = SqliteDedupe(database)
        consumer = kind("CG", address, settings=ONE_BY_ONE)

        @consumer.on("Orders", body=Order, dedupe=orders)
        def bill(order: Order, message) -> None:
            assert message.topic == "Orders"
            orders.connection.execute("INSERT INTO bills VALUES (?)", (order.id,))

        async with consumer:
            await until(lambda: 2 in bills(database), "the last order")
        assert bills(database) == [1, 2]


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_function_may_say_what_has_been_handled(is_async, tmp_path):
    async with three_orders(tmp_path) as address:
        seen, handled = set(), []

        def mark(message) -> None:
            seen.add(message.msg_id)
            handled.append(message.body_as(Order).id)

        async def mark_async(message) -> None:
            mark(message)

        async def was_seen(message) -> bool:
            return message.msg_id in seen

        consumer = PushConsumer("CG", address, settings=ONE_BY_ONE)
        dedupe = was_seen if is_async else lambda message: message.msg_id in seen
        consumer.subscribe("Orders", "*", mark_async if is_async else mark, dedupe=dedupe)
        async with consumer:
            await until(lambda: 2 in handled, "the last order")
        assert handled == [1, 2]


def test_subscriptions_that_cannot_be_are_refused(database):
    consumer, dedupe = PushConsumer("CG", "127.0.0.1:1"), SqliteDedupe(database)
    with pytest.raises(SettingsError, match="dedupe for topic T cannot be combined with batch_max"):
        consumer.subscribe("T", "*", print, dedupe=dedupe, batch_max=2)
    with pytest.raises(SettingsError, match="dedupe of topic T has no handler"):
        consumer.subscribe("T", dedupe=dedupe)
    with pytest.raises(SettingsError, match="write both as async def, or neither"):
        consumer.subscribe("T", "*", print, dedupe=_async)
    broadcasting = PushConsumer(
        "CG", "127.0.0.1:1", settings=PushConsumerSettings(message_model=MessageModel.BROADCASTING)
    )
    with pytest.raises(SettingsError, match="dedupe for topic T cannot be combined with broadcasting"):
        broadcasting.subscribe("T", "*", print, dedupe=dedupe)


class Ends(Hook):
    """Calls a function when a handler has ended, before its message is acknowledged."""

    def __init__(self, call) -> None:
        self.call = call

    def consuming(self, consumption):
        return lambda outcome: self.call()


KILLED = """
import os, signal, sys
from rmqkit import Hook, PushConsumerSettings, SqliteDedupe, StartFrom, sync

class Dies(Hook):
    def consuming(self, consumption):
        return lambda outcome: die()

_, namesrv, database, place = sys.argv
first = PushConsumerSettings(start_from=StartFrom.FIRST_OFFSET)
orders = SqliteDedupe(database)

def die():
    os.kill(os.getpid(), signal.SIGKILL)

consumer = sync.PushConsumer("CG", namesrv, settings=first, hooks=[Dies()])

@consumer.on("Orders", dedupe=orders)
def bill(message):
    orders.connection.execute("INSERT INTO bills VALUES (?)", (int(message.body),))
    if place == "before the commit":
        die()

consumer.run()
"""


@pytest.mark.faults
@pytest.mark.parametrize("place", ["before the commit", "after the commit"])
def test_a_killed_consumer_leaves_the_effect_once(place, tmp_path, database):
    with standalone(tmp_path) as namesrv:
        with sync.Producer("PG", namesrv) as producer:
            producer.send(Message(topic="Orders", body=b"17"))
        command = [sys.executable, "-c", KILLED, namesrv, str(database), place]
        killed = subprocess.run(command, timeout=200, check=False, cwd=ROOT)
        assert killed.returncode == -signal.SIGKILL
        assert bills(database) == ([17] if place == "after the commit" else [])
        dedupe, done = SqliteDedupe(database), threading.Event()
        consumer = sync.PushConsumer("CG", namesrv, settings=QUICK, hooks=[Ends(done.set)])

        @consumer.on("Orders", dedupe=dedupe)
        def bill(message) -> None:
            dedupe.connection.execute("INSERT INTO bills VALUES (?)", (int(message.body),))

        with consumer:
            assert done.wait(200)
        assert bills(database) == [17]


# -- Redis


class Cut(fakeredis.FakeRedis):
    """A Redis whose connection breaks after some calls."""

    calls_left = 1

    def execute_command(self, *arguments, **options):
        self.calls_left -= 1
        if self.calls_left < 0:
            raise redis.exceptions.ConnectionError("gone")
        return super().execute_command(*arguments, **options)


@pytest.mark.parametrize("decode_responses", [False, True])
def test_redis_keeps_what_was_handled(decode_responses):
    client = fakeredis.FakeRedis(decode_responses=decode_responses)
    called = []
    call = RedisDedupe(client, keep_hours=1).once(called.append, "G")
    for offset in (1, 2, 1):
        call(received(offset), offset)
    assert called == [1, 2]
    assert all(client.exists(f"rmqkit:seen:G:T:id-{offset}") for offset in (1, 2))
    assert HOUR_MS - 60_000 < client.pttl("rmqkit:seen:G:T:id-1") <= HOUR_MS


def test_what_another_member_handles_is_redelivered_later():
    client = fakeredis.FakeRedis()
    dedupe = RedisDedupe(client)

    def handler(depth: int) -> None:
        assert 899_000 < client.pttl("rmqkit:seen:G:T:id-1") <= 900_000
        with pytest.raises(ConsumeLater):
            call(received(1), depth + 1)

    call = dedupe.once(handler, "G")
    call(received(1), 0)


def test_a_handler_that_fails_gives_the_key_back():
    client = fakeredis.FakeRedis()
    dedupe = RedisDedupe(client)
    with pytest.raises(ZeroDivisionError):
        dedupe.once(lambda message: 1 // 0, "G")(received(1), None)
    assert client.keys() == []


def test_a_handler_that_fails_leaves_the_key_of_another_member():
    client = fakeredis.FakeRedis()

    def slow(message) -> None:
        client.set("rmqkit:seen:G:T:id-1", "another member's")  # the lease was over meanwhile
        raise ValueError

    with pytest.raises(ValueError):
        RedisDedupe(client).once(slow, "G")(received(1), None)
    assert client.get("rmqkit:seen:G:T:id-1") == b"another member's"


def test_without_redis_a_message_fails_and_one_that_was_handled_is_not_redelivered(caplog):
    called = []
    client = Cut()
    RedisDedupe(client).once(called.append, "G")(received(1), 1)
    assert called == [1]
    assert "cannot mark key rmqkit:seen:G:T:id-1: gone" in caplog.text
    with pytest.raises(redis.exceptions.ConnectionError):
        RedisDedupe(client).once(called.append, "G")(received(2), 2)
    assert called == [1]


async def test_coroutine_functions_have_an_asyncio_client():
    called = []

    async def handler(number: int) -> None:
        called.append(number)
        if number == 3:
            raise ValueError

    async with fakeredis.FakeAsyncRedis() as client:
        call = RedisDedupe(client).once(handler, "G")
        for number in (1, 2):
            await call(received(1), number)
        assert called == [1]
        with pytest.raises(ValueError):
            await call(received(3), 3)
        assert await client.keys() == [b"rmqkit:seen:G:T:id-1"]
        await client.set("rmqkit:seen:G:T:id-4", "another member's")
        with pytest.raises(ConsumeLater):
            await call(received(4), 4)
        with pytest.raises(SettingsError, match="needs a coroutine function"):
            RedisDedupe(client).once(print, "G")
    with pytest.raises(SettingsError, match="needs a plain function"):
        RedisDedupe(fakeredis.FakeRedis()).once(handler, "G")

"""Calls to an endpoint inside a broker: sends, receives, acks, dead letters. Source: grpc.md §2 to §8."""

from __future__ import annotations

import asyncio
import gc
import gzip
import hashlib
import zlib
from contextlib import suppress

import pytest

from rmqkit.broker.settings import BrokerSettings
from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.command import request
from rmqkit.protocol.compression import Compression, compress
from rmqkit.protocol.record import COMPRESSED, decode_record
from rmqkit.protocol.schemas.send import SendMessageV2Request
from rmqkit.proxy.schema.messages import message_class
from rmqkit.proxy.service.clients import CALLS_MAX
from rmqkit.proxy.service.endpoint import StreamFailed
from rmqkit.proxy.service.receiving import Receiving
from rmqkit.remoting.client import RemotingClient
from rmqkit.standalone import Standalone
from rmqkit.store.settings import FlushDiskType
from tests.proxy.calling import (
    ADDRESSES,
    BROKER,
    METHODS,
    Call,
    Caller,
    Stream,
    endpoint_before,
    endpoint_of,
    framed,
    message,
    receive_request,
    served,
)

OK, NOT_FOUND, BAD_HANDLE = 20000, 40401, 40013


@pytest.fixture(params=["broker", "proxy"])
async def caller(tmp_path, request):
    """A client of an endpoint in the broker, and of one in front of it."""
    async with served(tmp_path, by_proxy=request.param == "proxy") as it:
        it.is_proxy = request.param == "proxy"
        it.topic()
        yield it


@pytest.fixture
async def inside(tmp_path):
    """A client of an endpoint in the broker: topics and groups that change are seen at once."""
    async with served(tmp_path) as it:
        it.topic()
        yield it


def said(answer):
    return answer.status.code, answer.status.message


def properties_at(caller, offset=0):
    record = decode_record(caller.context.store.log.record_at(offset))
    entries = record.properties.decode().split("\x02")
    return dict(entry.split("\x01") for entry in entries if entry)


# ---- every call


@pytest.mark.parametrize("client_id", [None, "", " "])
async def test_every_call_names_its_client(caller, client_id):
    if client_id is None:
        del caller.metadata["x-mq-client-id"]
    else:
        caller.metadata["x-mq-client-id"] = client_id
    for method in caller.endpoint.methods:
        if method.streams_requests:
            stream = Stream(caller)
            told = await stream.ask(settings={})
            await stream.ended  # the server ends it
            assert said(told) == (40017, "client id cannot be empty")
        elif method.streams_responses:
            (item,) = await caller.items()
            assert said(item) == (40017, "client id cannot be empty"), "alone, without a time"
        else:
            assert said(await caller.ask(method.name)) == (40017, "client id cannot be empty"), method.name


def test_what_is_not_built_is_not_answered():
    unary = {method.name for method in METHODS.values()}
    assert {"PullMessage", "UpdateOffset", "GetOffset", "QueryOffset", "SyncLiteSubscription"} < unary


async def test_a_client_with_too_many_calls_under_way_waits(inside):
    inside.endpoint.clients.called("c1", ("10.0.0.7", 1), None).calls = CALLS_MAX
    assert said(await inside.send()) == (42900, "flow limit")


async def test_signatures_are_not_looked_at_where_nobody_has_to_sign(caller):
    """Python's SDK sends one of nobody when it has no keys."""
    nobody = "MQv2-HMAC-SHA1 Credential=, SignedHeaders=x-mq-date-time, Signature=00"
    for text in (nobody, "", "odd"):
        assert said(await caller.other("c2", authorization=text).send()) == (OK, "OK")


def with_enums(kind, number, depth=4):
    """Yield messages of a type, each with a number in one of its enums."""
    for field in kind.DESCRIPTOR.fields:
        if field.enum_type is not None:
            made = kind()
            getattr(made, field.name).append(number) if field.is_repeated else setattr(made, field.name, number)
            yield field.full_name, made
        elif field.message_type is not None and not field.message_type.GetOptions().map_entry and depth:
            for name, inner in with_enums(message_class(field.message_type.full_name), number, depth - 1):
                made = kind()
                where = getattr(made, field.name)
                (where.add() if field.is_repeated else where).MergeFrom(inner)
                yield name, made


@pytest.mark.parametrize("number", [-1, 99, (1 << 31) - 1])
async def test_no_enum_that_nobody_knows_is_an_error_of_ours(caller, caplog, number):
    whole = {
        "SendMessage": {"messages": [message()]},
        "ReceiveMessage": {},
        "Telemetry": {"settings": {"client_type": 3, "subscription": {"group": {"name": "G"}}}},
    }
    names = {"topic": {"name": "T"}, "group": {"name": "G"}}
    seen = set()
    for method in caller.endpoint.methods:
        known = {key: value for key, value in names.items() if key in method.request.DESCRIPTOR.fields_by_name}
        own = receive_request() if method.streams_responses and not method.streams_requests else None
        for name, odd in with_enums(method.request, number):
            asked = method.request()
            asked.MergeFrom(own or method.request(**whole.get(method.name, known)))
            asked.MergeFrom(odd)
            seen.add(name)
            if method.streams_requests:
                stream = Stream(caller.other(name))
                stream.sent.put_nowait(asked)
                stream.sent.put_nowait(None)
                with suppress(StreamFailed):
                    await stream.ended
            elif method.streams_responses:
                items = asyncio.Queue()
                call = Call(caller.metadata, 5)
                await caller.endpoint.receive(method, call, asked, items.put, framed(items.put))
                assert items.get_nowait().WhichOneof("content") == "status"
            else:
                assert (await caller.endpoint.unary(method, Call(caller.metadata, 5), asked)).status.code
    assert len(seen) >= 10, seen
    assert not [record.message for record in caplog.records if record.levelname == "ERROR"]


# ---- QueryRoute, QueryAssignment


async def test_a_route_names_the_address_that_was_asked(caller):
    caller.topic("W", 3)
    answer = await caller.ask("QueryRoute", topic={"name": "W", "resource_namespace": "ns"}, endpoints=ADDRESSES)
    assert said(answer) == (OK, "OK")
    assert [queue.id for queue in answer.message_queues] == [0, 1, 2]
    (first, *_) = answer.message_queues
    assert (first.permission, list(first.accept_message_types)) == (4, [1])
    assert (first.broker.name, first.broker.id, first.topic.resource_namespace) == (BROKER, 0, "ns")
    (address,) = first.broker.endpoints.addresses
    assert (address.host, address.port) == ("10.0.0.9", 8081)


@pytest.mark.parametrize(
    ("message_type", "types"),
    [("FIFO", [2]), ("DELAY", [3]), ("TRANSACTION", [4]), ("PRIORITY", [6]), ("MIXED", [1, 2, 3, 4]), ("?", [0])],
)
async def test_a_route_reports_what_the_topic_takes(caller, message_type, types):
    caller.topic("W", message_type=message_type)
    answer = await caller.ask("QueryRoute", topic={"name": "W"}, endpoints=ADDRESSES)
    assert list(answer.message_queues[0].accept_message_types) == types


async def test_a_route_reports_which_queues_are_read_and_written_by_their_ids(inside):
    inside.topic("W", 4)
    inside.context.topics.get("W").write_queue_nums = 2
    answer = await inside.ask("QueryRoute", topic={"name": "W"}, endpoints=ADDRESSES)
    assert [(queue.id, queue.permission) for queue in answer.message_queues] == [(0, 4), (1, 4), (2, 2), (3, 2)]
    inside.context.topics.get("W").perm = 0
    answer = await inside.ask("QueryRoute", topic={"name": "W"}, endpoints=ADDRESSES)
    assert {queue.permission for queue in answer.message_queues} == {1}


async def test_a_route_of_nothing(caller):
    answer = await caller.ask("QueryRoute", topic={"name": "X"}, endpoints=ADDRESSES)
    assert answer.status.code == 40402
    assert "CODE: 17  DESC: No topic route info in name server for the topic: X" in answer.status.message
    assert (await caller.ask("QueryRoute", topic={"name": "a b"}, endpoints=ADDRESSES)).status.code == 40002
    assert (await caller.ask("QueryRoute", topic={"name": "T"})).status.code == 50001, "no address scheme"


async def test_an_assignment_is_the_broker_or_its_queues_in_order(inside):
    inside.topic("W", 2)
    names = {"topic": {"name": "W"}, "group": {"name": "G"}, "endpoints": ADDRESSES}
    answer = await inside.ask("QueryAssignment", **names)
    assert [one.message_queue.id for one in answer.assignments] == [-1]
    inside.context.groups.get("G").consume_message_orderly = True
    answer = await inside.ask("QueryAssignment", **names)
    assert [one.message_queue.id for one in answer.assignments] == [0, 1]
    inside.context.topics.get("W").perm = 2
    assert said(await inside.ask("QueryAssignment", **names)) == (40300, "no readable queue")


# ---- SendMessage


async def test_a_send_is_answered_with_the_clients_own_id(caller):
    answer = await caller.send(properties={"a": "b"}, tag="t", keys=["k1", "k2"], trace_context="00-ab")
    (entry,) = answer.entries
    assert said(answer) == said(entry) == (OK, "OK")
    assert (entry.message_id, entry.transaction_id, entry.offset, entry.recall_handle) == ("ID1", "ID1", 0, "")
    assert (await caller.send()).entries[0].offset == 1
    stored = properties_at(caller)
    assert stored == {
        "UNIQ_KEY": "ID1",
        "PGROUP": "T",
        "RECONSUME_TIME": "0",
        "TAGS": "t",
        "KEYS": "k1 k2",
        "a": "b",
        "TRACE_CONTEXT": "00-ab",
        "__BORNHOST": "10.0.0.7:50000",
        "BORN_TIMESTAMP": "0",
        "MSG_REGION": "DefaultRegion",
        "CLUSTER": "DefaultCluster",
        "TRACE_ON": "true",
    }
    record = decode_record(caller.context.store.log.record_at(0))
    own = (127, 0, 0, 1) if caller.is_proxy else (10, 0, 0, 7)
    assert record.born_host[:4] == bytes(own), "the client's own address, or the proxy's"


async def test_several_messages_have_an_entry_each(caller):
    answer = await caller.ask("SendMessage", messages=[message(message_id=f"ID{number}") for number in range(3)])
    assert [(entry.message_id, entry.offset) for entry in answer.entries] == [("ID0", 0), ("ID1", 1), ("ID2", 2)]
    status, found = await caller.receive()
    assert status.code == OK
    assert [one.system_properties.message_id for one in found] == ["ID0", "ID1", "ID2"]


async def test_delayed_messages_are_not_sent_together(caller):
    caller.topic("D", message_type="DELAY")
    both = [message("D", message_id=one, delivery_timestamp={"seconds": 1}) for one in ("a", "b")]
    assert (await caller.ask("SendMessage", messages=both)).status.code == 40000


async def test_a_topic_refuses_other_types(caller):
    expected = "TopicMessageType validate failed, the expected type is NORMAL, but actual type is "
    assert said(await caller.send(message_group="g")) == (40014, expected + "FIFO")
    assert said(await caller.send(properties={"__SHARDINGKEY": "g"})) == (40014, expected + "FIFO")
    assert said(await caller.send(message_type=4)) == (40014, expected + "TRANSACTION")
    missing = await caller.send("X")
    assert said(missing) == (40014, expected.replace("NORMAL", "UNSPECIFIED") + "NORMAL")


async def test_a_topic_that_cannot_be_written(caller):
    caller.topic("W", perm=4)
    assert said(await caller.send("W")) == (40300, "no writable queue")


async def test_groups_keep_their_queue_and_others_take_turns(caller):
    caller.topic("F", 4, "FIFO")
    caller.topic("W", 4)
    for number in range(8):
        await caller.send("F", message_group="order-1", message_id=f"f{number}")
        await caller.send("W", message_id=f"w{number}")
    store = caller.context.store
    assert [store.bounds("F", queue_id)[1] for queue_id in range(4)] == [0, 0, 0, 8]
    assert [store.bounds("W", queue_id)[1] for queue_id in range(4)] == [2, 2, 2, 2]


async def test_a_long_trace_context_is_refused_as_properties(caller):
    assert (await caller.send(trace_context="x" * 33_000)).status.code == 43101


@pytest.mark.parametrize("number", [-1, 7, 1 << 30])
async def test_enums_that_nobody_knows_are_numbers(caller, number):
    answer = await caller.send(message_type=number, body_encoding=number)
    assert answer.status.code == OK
    assert (await caller.one()).system_properties.message_type == 1


# ---- ReceiveMessage, AckMessage, ChangeInvisibleDuration


async def test_a_message_comes_as_it_was_sent(caller):
    await caller.send(properties={"a": "b"}, tag="t", keys=["k1", "k2"], born_host="probe", trace_context="00-ab")
    found = await caller.one()
    system = found.system_properties
    assert (found.topic.name, found.body, dict(found.user_properties)) == (
        *("T", b"hello"),
        {"a": "b", "TRACE_CONTEXT": "00-ab"},
    )
    assert (system.tag, list(system.keys), system.message_id) == ("t", ["k1", "k2"], "ID1")
    assert (system.body_digest.type, system.body_digest.checksum) == (2, "5D41402ABC4B2A76B9719D911017C592")
    assert (system.body_encoding, system.message_type, system.delivery_attempt) == (1, 1, 1)
    assert (system.born_host, system.queue_id, system.queue_offset) == ("probe", 0, 0)
    assert len(system.receipt_handle.split(" ")) == 9
    assert not system.HasField("priority")
    assert not system.HasField("invisible_duration")


async def test_an_acknowledged_message_is_not_redelivered(caller):
    await caller.send()
    handle = (await caller.one()).system_properties.receipt_handle
    answer = await caller.ack(handle)
    assert said(answer) == (OK, "OK")
    assert (answer.entries[0].message_id, answer.entries[0].receipt_handle) == ("ID1", handle)
    assert said(await caller.ack(handle)) == (OK, "OK"), "twice within its time"
    await asyncio.sleep(40)
    assert said_status(await caller.receive()) == (NOT_FOUND, "no new message")


def said_status(received):
    return received[0].code, received[0].message


async def test_what_is_not_acknowledged_is_redelivered_with_its_count(caller):
    await caller.send()
    first = await caller.one(invisible=10)
    again = await caller.one(long_polling_timeout={"seconds": 20})
    assert (first.system_properties.delivery_attempt, again.system_properties.delivery_attempt) == (1, 2)
    expired = await caller.ack(first.system_properties.receipt_handle)
    assert said(expired.entries[0]) == (BAD_HANDLE, "receipt handle is expired")
    assert again.topic.name == "T", "not the retry topic"
    assert said(await caller.ack(again.system_properties.receipt_handle)) == (OK, "OK")


async def test_acks_of_several_are_reported_one_by_one(caller):
    await caller.send()
    handle = (await caller.one()).system_properties.receipt_handle
    foreign = handle.replace(BROKER, "zzz")
    answer = await caller.ack(handle, "bla", foreign)
    assert said(answer) == (30000, "MULTIPLE_RESULTS")
    assert [entry.status.code for entry in answer.entries] == [OK, BAD_HANDLE, BAD_HANDLE]
    assert answer.entries[2].status.message == "cannot find broker zzz"
    assert said(await caller.ack()) == (50001, "ack message result is empty")
    assert said(await caller.ack(*["bla"] * 10_001)) == (40000, "10001 acks in one call: the limit is 10000")


@pytest.mark.parametrize(("offset", "queue"), [(99, 0), (0, 99), (1 << 62, 0)])
async def test_an_ack_of_what_is_not_there(caller, offset, queue):
    await caller.send()
    words = (await caller.one()).system_properties.receipt_handle.split(" ")
    words[6], words[7] = str(queue), str(offset)
    assert (await caller.ack(" ".join(words))).status.code == 50001


async def test_a_changed_time_has_a_handle_of_its_own(caller):
    await caller.send()
    handle = (await caller.one()).system_properties.receipt_handle
    changed = await caller.change(handle, 20)
    assert said(changed) == (OK, "OK")
    assert changed.receipt_handle != handle
    assert said(await caller.ack(changed.receipt_handle)) == (OK, "OK")
    await asyncio.sleep(60)
    assert (await caller.receive())[0].code == NOT_FOUND


async def test_a_message_handed_back_comes_soon(caller):
    await caller.send()
    handle = (await caller.one()).system_properties.receipt_handle
    await caller.change(handle, 0)
    assert (await caller.one()).system_properties.delivery_attempt == 2


async def test_a_suspended_message_comes_with_the_same_attempt(caller):
    await caller.send()
    attempts = []
    for suspend in (True, False, True, False):
        found = (await caller.one()).system_properties
        attempts.append(found.delivery_attempt)
        await caller.change(found.receipt_handle, 0, suspend=suspend)
    assert attempts == [1, 1, 2, 2]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-1, "the invisibleTime is too small. min is 0"), (43_201, "the invisibleTime is too large. max is 43200000")],
)
async def test_times_that_cannot_be(caller, seconds, text):
    assert said(await caller.change("0 1 2 3 0 b 2 5 6", seconds)) == (40011, text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (9, "the invisibleTime is too small. min is 10000"),
        (43_201, "the invisibleTime is too large. max is 43200000"),
        (1 << 62, f"a time of {1 << 62} s and 0 ns is out of range"),
    ],
)
async def test_invisible_times_that_cannot_be(caller, seconds, text):
    status, messages = await caller.receive(invisible=seconds)
    assert (status.code, status.message, messages) == (40011, text, [])


async def test_a_receive_waits_its_time(caller):
    loop = asyncio.get_running_loop()
    for asked, deadline, wanted in ((0, None, 5), (7, None, 7), (60, None, 20), (20, 8, 8), (None, 23, 20)):
        began = loop.time()
        more = {} if asked is None else {"long_polling_timeout": {"seconds": asked}}
        first, _ = await caller.items(seconds=deadline, **more)
        assert said(first) == (NOT_FOUND, "no new message")
        assert loop.time() - began == pytest.approx(wanted, abs=1.6)
    first, _ = await caller.items(seconds=3)
    assert first.status.code == 40018
    caller.metadata["x-mq-client-version"] = "5.0.2"
    first, _ = await caller.items(seconds=3)
    assert first.status.code == 40000


async def test_a_held_receive_is_answered_when_a_message_comes(caller):
    waiting = asyncio.ensure_future(caller.one())
    await asyncio.sleep(3)
    await caller.other("c2").send()
    assert (await waiting).body == b"hello"


async def test_what_a_receive_may_ask(caller):
    for number in range(40):
        await caller.send(message_id=f"ID{number}")
    assert len((await caller.receive(batch_size=50, invisible=600))[1]) == 32
    assert (await caller.receive(batch_size=0))[0].code == NOT_FOUND
    assert (await caller.receive(batch_size=-5))[0].code == NOT_FOUND
    assert len((await caller.receive(batch_size=(1 << 31) - 1))[1]) == 8
    assert (await caller.receive(topic="X"))[0].code == 40402
    assert (await caller.receive(topic="a b"))[0].code == 40002
    assert (await caller.receive(group="a b"))[0].code == 40003
    assert (await caller.receive(expression="||"))[0].code == 40010
    caller.topic("W")
    caller.context.topics.get("W").perm = 2
    await caller.published()
    assert (await caller.receive(topic="W"))[0].message == "no readable queue"


async def test_filters_by_tags_and_sql(tmp_path):
    async with served(tmp_path, property_filter=True) as caller:
        caller.topic()
        for tag in ("a", "b", "c"):
            await caller.send(tag=tag, message_id=tag, properties={"n": str(ord(tag))})
        status, found = await caller.receive(group="G1", expression="a || c")
        assert (status.code, [one.system_properties.tag for one in found]) == (OK, ["a", "c"])
        status, found = await caller.receive(group="G2", expression="n > 97 AND n < 99", kind=2)
        assert (status.code, [one.system_properties.tag for one in found]) == (OK, ["b"])
        status, _ = await caller.receive(group="G2", expression="n >", kind=2)
        assert (status.code, status.message) == (50001, "parse the consumer's subscription failed")


async def test_tags_of_one_hash_are_distinguished(caller):
    await caller.send(tag="BB")  # "Aa" has the same hash
    assert said_status(await caller.receive(expression="Aa")) == (NOT_FOUND, "no match message")
    await asyncio.sleep(60)
    assert said_status(await caller.receive(expression="Aa")) == (NOT_FOUND, "no new message"), "acknowledged"


async def test_a_receive_that_is_cancelled_keeps_nothing(caller, caplog):
    waiting = asyncio.ensure_future(caller.receive())
    await asyncio.sleep(3)  # settings are waited for first
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await caller.send()
    # A broker behind a proxy is not notified: the popped messages are returned.
    assert (await caller.one()).system_properties.delivery_attempt == (2 if caller.is_proxy else 1)
    del waiting
    gc.collect()
    assert not [record for record in caplog.records if record.levelname == "ERROR"], "nobody is there to see one"


async def test_a_receive_that_is_cancelled_anywhere_keeps_nothing(caller):
    """Cancel one loop iteration later each time, until the message is written."""
    stream, _ = await caller.consumer()
    method, items = METHODS["ReceiveMessage"], asyncio.Queue()
    for turns in range(1000):
        await caller.send(message_id=f"ID{turns}")
        call = Call(caller.metadata, None)
        receiving = asyncio.ensure_future(
            caller.endpoint.receive(method, call, receive_request(invisible=3000), items.put, framed(items.put))
        )
        for _ in range(turns):
            await asyncio.sleep(0)
        receiving.cancel()
        await asyncio.wait([receiving])
        if any(items.get_nowait().HasField("message") for _ in range(items.qsize())):
            break
        again = await caller.one(long_polling_timeout={"seconds": 20})
        assert again.system_properties.message_id == f"ID{turns}", turns
        assert said(await caller.ack(again.system_properties.receipt_handle)) == (OK, "OK")
    assert turns >= 2, "it has awaited something"
    await stream.end()


async def test_what_was_popped_for_a_receive_that_is_cancelled_comes_soon(tmp_path, monkeypatch):
    async with served(tmp_path, store={"flush_disk_type": FlushDiskType.SYNC_FLUSH}) as caller:
        caller.topic()
        stream, _ = await caller.consumer()
        await caller.send()
        await caller.ack((await caller.one()).system_properties.receipt_handle)
        await caller.send()
        store = caller.context.store
        monkeypatch.setattr(store, "request_flush", lambda: None)
        receiving = asyncio.ensure_future(caller.receive(invisible=300))
        # A pop is answered when its check point is on the disk.
        check_points = caller.context.pop.check_points
        while not check_points.in_flight:
            await asyncio.sleep(0)
        assert not receiving.done()
        receiving.cancel()
        await asyncio.wait([receiving])
        monkeypatch.undo()
        store.request_flush()
        await asyncio.sleep(0.5)
        (pending,) = check_points._table.values()
        assert pending.due_ms - caller.context.clock.now_ms() <= 1000
        await stream.end()


async def test_what_cannot_be_written_is_redelivered(caller):
    for number in range(3):
        await caller.send(message_id=f"ID{number}")
    written = []

    async def write(item):
        if len(written) == 2:
            raise ConnectionError("gone")
        written.append(item)

    method = METHODS["ReceiveMessage"]
    with pytest.raises(ConnectionError):
        await caller.endpoint.receive(method, Call(caller.metadata, None), receive_request(), write, framed(write))
    assert written[1].message.system_properties.message_id == "ID0"
    _, found = await caller.receive()
    assert {one.system_properties.message_id for one in found} <= {"ID1", "ID2"}
    assert found[0].system_properties.delivery_attempt == 2


@pytest.mark.parametrize("by_proxy", [False, True])
async def test_messages_that_no_client_received_come_soon_after_a_stop(tmp_path, monkeypatch, by_proxy):
    returned, change = [], Receiving.change

    async def slow_change(self, *arguments):
        await asyncio.sleep(0.1)  # the broker has other work, too
        returned.append(await change(self, *arguments))
        return returned[-1]

    monkeypatch.setattr(Receiving, "change", slow_change)
    own = BrokerSettings(listen_port=0, bind_address="127.0.0.1", broker_name=BROKER)
    async with Standalone(tmp_path / "store", broker=own) as servers:
        context = servers.broker.context
        async with endpoint_before(servers) if by_proxy else endpoint_of(servers.broker) as endpoint:
            caller = Caller(endpoint, context)
            caller.topic()
            await caller.published()
            for number in range(3):
                await caller.send(message_id=f"ID{number}")
            begun = asyncio.Event()

            async def write(item):
                begun.set()
                await asyncio.Event().wait()

            asked, call = receive_request(invisible=3000), Call(caller.metadata, None)
            receiving = endpoint.receive(METHODS["ReceiveMessage"], call, asked, write, framed(write))
            receiving = asyncio.ensure_future(receiving)
            await begun.wait()
            receiving.cancel()
            await asyncio.wait([receiving])
        assert len(returned) == 3, "a stop waits until the messages are returned"
        async with endpoint_of(servers.broker) as endpoint:
            caller = Caller(endpoint, context)
            found = set()
            while len(found) < 3:
                status, several = await caller.receive(long_polling_timeout={"seconds": 20})
                assert several, status
                assert {one.system_properties.delivery_attempt for one in several} == {2}
                found |= {one.system_properties.message_id for one in several}


# ---- retries and dead letters


async def test_after_its_attempts_a_message_is_dead(caller):
    caller.context.groups.get("G").retry_max_times = 2
    await caller.send()
    for attempt in (1, 2, 3):
        found = await caller.one()
        assert found.system_properties.delivery_attempt == attempt
        await caller.change(found.system_properties.receipt_handle, 0)
    assert said_status(await caller.receive()) == (NOT_FOUND, "no match message")
    await caller.published()
    dead = await caller.one(topic="%DLQ%G", group="H")
    assert (dead.body, dead.topic.name) == (b"hello", "%DLQ%G")


async def test_a_client_puts_a_message_to_the_dead_letters(caller):
    await caller.send()
    found = await caller.one()
    names = {"group": {"name": "G"}, "topic": {"name": "T"}, "message_id": "ID1"}
    handle = found.system_properties.receipt_handle
    assert said(await caller.ask("ForwardMessageToDeadLetterQueue", receipt_handle=handle, **names)) == (OK, "0")
    await caller.published()
    assert (await caller.one(topic="%DLQ%G", group="H")).system_properties.delivery_attempt == 2
    short = " ".join(handle.split(" ")[:8])
    answer = await caller.ask("ForwardMessageToDeadLetterQueue", receipt_handle=short, **names)
    assert said(answer) == (BAD_HANDLE, "commit log offset is empty")


async def test_a_handle_cannot_move_another_message(caller):
    caller.topic("Secret")
    await caller.send("Secret", b"not yours", "S1")
    await caller.send()
    words = (await caller.one()).system_properties.receipt_handle.split(" ")
    words[8] = "0"  # the log offset of the other message
    names = {"group": {"name": "G"}, "topic": {"name": "T"}, "message_id": "ID1"}
    answer = await caller.ask("ForwardMessageToDeadLetterQueue", receipt_handle=" ".join(words), **names)
    assert answer.status.code == BAD_HANDLE
    assert caller.context.topics.get("%DLQ%G") is None


async def test_messages_of_a_group_come_in_order(caller):
    caller.topic("F", 1, "FIFO")
    caller.context.groups.get("G").consume_message_orderly = True
    stream, told = await caller.consumer("F")
    assert told.subscription.fifo
    for number in range(3):
        await caller.send("F", message_group="g", message_id=f"ID{number}")
    first = await caller.one(topic="F", batch_size=1, attempt_id="one")
    same = await caller.one(topic="F", batch_size=1, attempt_id="one")
    assert same.system_properties.message_id == first.system_properties.message_id == "ID0"
    assert (await caller.receive(topic="F", attempt_id="other"))[0].code == NOT_FOUND, "one batch at a time"
    await caller.ack(same.system_properties.receipt_handle, topic="F")
    following = await caller.one(topic="F", batch_size=1, attempt_id="two", invisible=10)
    assert following.system_properties.message_id == "ID1"
    again = await caller.one(topic="F", batch_size=1, attempt_id="three", long_polling_timeout={"seconds": 20})
    assert (again.system_properties.message_id, again.system_properties.delivery_attempt) == ("ID1", 2), "not ID2"
    await stream.end()


# ---- bodies of the other protocol


async def test_a_body_that_an_sdk_compressed_is_zlib_for_others(caller):
    compressed = gzip.compress(b"hello" * 1000)
    assert (await caller.send(body=compressed, body_encoding=2)).status.code == OK
    record = decode_record(caller.context.store.log.record_at(0))
    assert (record.sys_flag & 0x701, zlib.decompress(record.body)) == (0x301, b"hello" * 1000)
    found = await caller.one()
    assert (found.body, found.system_properties.body_encoding) == (b"hello" * 1000, 1)
    assert found.system_properties.body_digest.checksum == hashlib.md5(b"hello" * 1000).hexdigest().upper()


@pytest.mark.parametrize(
    "body",
    [b"no gzip", gzip.compress(b"x", mtime=0)[:-1], gzip.compress(b"x", mtime=0) * 2, b"\x1f\x8b\x08"],
    ids=["text", "cut", "two", "head"],
)
async def test_what_is_called_gzip_and_is_none_is_kept_as_it_is(caller, body):
    await caller.send(body=body, body_encoding=2)
    assert decode_record(caller.context.store.log.record_at(0)).body == body
    found = await caller.one()
    assert (found.body, found.system_properties.body_encoding) == (body, 2)


@pytest.mark.parametrize("compression", [Compression.ZLIB, Compression.LZ4, Compression.ZSTD])
async def test_a_body_that_a_remoting_producer_compressed_is_plain_for_sdks(caller, compression):
    header = SendMessageV2Request(
        *("p", "T", "TBW102", 4, 0, COMPRESSED | compression, 0, 0),
        properties="UNIQ_KEY\x01ID1\x02",
    )
    body = compress(b"hello" * 1000, compression)
    client = RemotingClient()
    await client.call(caller.context.address, request(RequestCode.SEND_MESSAGE_V2, header, body), 60_000)
    await client.close()
    found = await caller.one()
    assert (found.body, found.system_properties.body_encoding) == (b"hello" * 1000, 1)


async def test_a_body_of_many_bytes_in_few_is_reported_as_it_is_stored(caller):
    bomb = gzip.compress(bytes(17 << 20))
    await caller.send(body=bomb, body_encoding=2)
    found = await caller.one()
    assert (found.body, found.system_properties.body_encoding) == (bomb, 2)


async def test_a_first_receive_waits_for_settings_and_others_do_not(caller):
    await caller.send(message_id="ID1")
    await caller.send(message_id="ID2")
    loop = asyncio.get_running_loop()
    waits = []
    for _ in range(2):
        began = loop.time()
        await caller.one(batch_size=1)
        waits.append(loop.time() - began)
    assert waits == [pytest.approx(1.0, abs=0.2), pytest.approx(0.0, abs=0.2)]

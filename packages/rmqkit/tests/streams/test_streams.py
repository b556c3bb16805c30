"""Durable streams: appends, reads from any event on, restarts, expiry, repeated sends, bad input (lite.md §14)."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta

import msgspec
import pytest

import rmqkit
from rmqkit.broker.server import Broker
from rmqkit.broker.settings import BrokerSettings
from rmqkit.clock import SYSTEM_CLOCK
from rmqkit.errors import ClientError, EventIdIllegal, MessageIllegal, PeerRefused, SettingsError, StreamExpired
from rmqkit.namesrv.server import NameServer
from rmqkit.namesrv.settings import NamesrvSettings
from rmqkit.protocol.message import Message
from rmqkit.protocol.schemas.topics import TopicConfig
from rmqkit.rpc import PullStatus
from rmqkit.standalone import Standalone
from rmqkit.store.settings import StoreSettings
from rmqkit.streams.event import LAST, Place, event_id, place_of, stream_of
from rmqkit.streams.reader import KEYS_KEPT
from tests.ports import free_port

PARENT = "Chats"


class Servers:
    """A name server, and a broker that a test can stop and start."""

    def __init__(self, root, clock=SYSTEM_CLOCK, **settings):
        self._clock = clock
        self.namesrv = NameServer(NamesrvSettings(listen_port=0, bind_address="127.0.0.1"))
        self._root, self._settings, self._port = root, settings, free_port(-2, 1)
        self.broker = None

    async def __aenter__(self):
        await self.namesrv.start()
        await self.start_broker()
        return self

    async def __aexit__(self, *raised):
        await self.stop_broker()
        await self.namesrv.stop()

    async def start_broker(self):
        settings = BrokerSettings(
            listen_port=self._port,
            bind_address="127.0.0.1",
            broker_name="broker-a",
            namesrv_addr=self.namesrv.address,
            **self._settings,
        )
        self.broker = Broker(settings, StoreSettings(commit_log_file_bytes=1 << 20), self._root, clock=self._clock)
        await self.broker.start()

    async def stop_broker(self):
        if self.broker is not None:
            await self.broker.stop()
            self.broker = None

    @property
    def address(self):
        return self.namesrv.address


@asynccontextmanager
async def opened(root, servers_settings=None, **options):
    async with AsyncExitStack() as stack:
        servers = await stack.enter_async_context(Servers(root, **(servers_settings or {})))
        yield servers, await stack.enter_async_context(rmqkit.streams.open(servers.address, PARENT, **options))


async def stored(streams, name, **options):
    return [one async for one in streams.read(name, follow=False, **options)]


async def texts(streams, name, **options):
    return [one.text for one in await stored(streams, name, **options)]


async def test_events_are_read_in_the_order_in_which_they_were_appended(tmp_path):
    async with opened(tmp_path) as (_, streams):
        ids = [await streams.append("s1", "a"), await streams.append("s1", b"b", headers={"role": "user"})]
        await streams.append("s2", "other")
        events = await stored(streams, "s1")
        assert ids == [one.id for one in events] == ["1.0.s1", "1.1.s1"]
        assert [(one.stream, one.data, one.headers, one.is_last) for one in events] == [
            ("s1", b"a", {}, False),
            ("s1", b"b", {"role": "user"}, False),
        ]
        assert events[0].stored_at.tzinfo is not None


async def test_concurrent_appends_keep_the_order_of_the_calls_and_share_requests(tmp_path):
    async with opened(tmp_path) as (_, streams):
        for low, high in ((0, 3), (3, 300), (300, 2000)):
            ids = await asyncio.gather(*(streams.append("s", str(i)) for i in range(low, high)))
            assert ids == [f"1.{i}.s" for i in range(low, high)]
        assert await texts(streams, "s") == [str(i) for i in range(2000)]


async def test_a_reader_gets_new_events_and_stops_after_the_last_one(tmp_path):
    async with opened(tmp_path) as (_, streams):

        async def read():
            return [(one.text, one.is_last) async for one in streams.read("s")]

        reading = [asyncio.create_task(read()) for _ in range(3)]
        await asyncio.sleep(20)  # longer than a broker holds a pull
        await streams.append("s", "a")
        await asyncio.sleep(5)
        await streams.append("s", "b")
        await streams.finish("s")
        assert await asyncio.gather(*reading) == [[("a", False), ("b", False), ("", True)]] * 3


async def test_an_event_with_content_can_be_the_last_one(tmp_path):
    async with opened(tmp_path) as (_, streams):
        await streams.append("s", "a")
        await streams.append("s", "b", last=True)
        assert [(one.text, one.is_last) async for one in streams.read("s")] == [("a", False), ("b", True)]


async def test_a_read_begins_after_any_event(tmp_path):
    async with opened(tmp_path) as (_, streams):
        ids = [await streams.append("s", str(i)) for i in range(6)]
        for i, one in enumerate(ids):
            assert await texts(streams, "s", after=one) == [str(n) for n in range(i + 1, 6)]
        assert await texts(streams, "s", after="1.4") == ["5"], "the stream can be left out"
        assert [one.text async for one in streams.read_after(ids[3], follow=False)] == ["4", "5"]
        assert (await streams.last("s")).text == "5"
        assert await streams.last("none") is None


async def test_a_read_after_the_last_event_of_a_finished_stream_stops_at_once(tmp_path):
    async with opened(tmp_path) as (_, streams):
        await streams.append("s", "a")
        last = await streams.finish("s")
        assert [one async for one in streams.read("s", after=last)] == []
        assert not await streams.read("s", after=last).start()
        assert await streams.read("s", after="1.0").start(), "the last event follows"
        await streams.append("s", "b")
        reading = streams.read("s", after=last)
        assert await reading.start() and (await anext(reading)).text == "b", "the stream was continued"


async def test_a_last_event_that_was_sent_twice_is_the_last_one_too(tmp_path):
    async with opened(tmp_path) as (_, streams):
        for _ in range(2):
            properties = {LAST: "content"}
            message = Message(topic=PARENT, lite_topic="s", body=b"a", msg_id="K1", properties=properties)
            await streams._producer.send(message)
        for after in ("1.0", "1.1"):
            assert [one async for one in streams.read("s", after=after)] == []


async def test_a_reader_checks_its_place_when_it_starts(tmp_path):
    async with opened(tmp_path) as (_, streams):
        assert await streams.read("s").start(), "a stream without events is waited for"
        with pytest.raises(StreamExpired):
            await streams.read("s", after="1.3").start()
        await streams.append("s", "a")
        with pytest.raises(EventIdIllegal):
            await streams.read("s", after="1.3").start()
        reading = streams.read("s", after="1.0")
        assert await reading.start() and await reading.start(), "a second call has no effect"
        await streams.append("s", "b")
        assert (await anext(reading)).text == "b"


async def test_events_that_are_fetched_together_are_a_batch(tmp_path):
    async with opened(tmp_path) as (_, streams):
        await asyncio.gather(*(streams.append("s", str(i)) for i in range(70)))
        batches = [[one.text for one in batch] async for batch in streams.read("s", follow=False).batches()]
        assert [len(one) for one in batches] == [32, 32, 6]
        assert [one for batch in batches for one in batch] == [str(i) for i in range(70)]
        resumed = [
            [one.text for one in batch] async for batch in streams.read("s", after="1.40", follow=False).batches()
        ]
        assert [one for batch in resumed for one in batch] == [str(i) for i in range(41, 70)]
        assert [] not in resumed


async def test_the_newest_event_of_a_long_stream_is_found_near_its_end(tmp_path):
    async with opened(tmp_path) as (_, streams):
        await asyncio.gather(*(streams.append("s", str(i)) for i in range(KEYS_KEPT + 500)))
        pulls, pull = [], streams._runtime.calls.pull

        async def noted(address, header, timeout_ms):
            pulls.append(header.queue_offset)
            return await pull(address, header, timeout_ms)

        streams._runtime.calls.pull = noted
        assert (await streams.last("s")).text == str(KEYS_KEPT + 499)
        assert min(pulls[1:]) == 500


@pytest.mark.parametrize("options", [{"after": "1.2"}, {"follow": False}, {}])
async def test_a_reader_does_not_hurry_a_broker_that_has_fewer_events_than_it_had(tmp_path, options):
    """A slave that becomes the master may lack the newest events for a while."""
    async with opened(tmp_path) as (_, streams):
        await asyncio.gather(*(streams.append("s", str(i)) for i in range(5)))
        pulls, pull = [], streams._runtime.calls.pull

        async def lagging(address, header, timeout_ms):
            pulls.append(asyncio.get_running_loop().time())
            pulled = await pull(address, header, timeout_ms)
            if pulls[0] < pulls[-1] < pulls[0] + 20:
                return msgspec.structs.replace(
                    pulled, status=PullStatus.OFFSET_ILLEGAL, next_begin_offset=0, max_offset=0, body=b""
                )
            return pulled

        streams._runtime.calls.pull = lagging
        reading = streams.read("s", **options)
        texts = [(await anext(reading)).text for _ in range(2)]
        assert texts == (["3", "4"] if "after" in options else ["0", "1"])
        assert 30 < len(pulls) < 60


async def test_a_reader_of_streams_that_are_closed_gets_an_error(tmp_path):
    async with Servers(tmp_path) as servers:
        streams = await rmqkit.streams.open(servers.address, PARENT)
        await streams.append("s", "a")
        reading = streams.read("s")
        await anext(reading)
        following = asyncio.create_task(anext(reading))
        await asyncio.sleep(1)
        await streams.close()
        with pytest.raises(ClientError, match="stream s: the streams were closed while it was read"):
            await following


async def test_new_events_only(tmp_path):
    async with opened(tmp_path) as (_, streams):
        await streams.append("s", "old")
        reading = asyncio.create_task(anext(streams.read("s", new=True)))
        await asyncio.sleep(1)
        await streams.append("s", "new")
        assert (await reading).text == "new"


async def test_a_read_continues_after_a_restart_of_the_broker(tmp_path):
    async with opened(tmp_path) as (servers, streams):
        for i in range(5):
            last = await streams.append("s", str(i))
        reading = streams.read("s", after="1.2")
        assert [(await anext(reading)).text for _ in range(2)] == ["3", "4"]
        following = asyncio.create_task(anext(reading))
        await asyncio.sleep(1)
        await servers.stop_broker()
        await asyncio.sleep(3)
        await servers.start_broker()
        await streams.append("s", "5")
        assert (await following).text == "5"
        assert await texts(streams, "s", after=last) == ["5"]


async def test_an_expired_stream_is_an_error_and_its_next_life_another_one(tmp_path):
    settings = {"lite_expiry_interval_ms": 5000}
    async with opened(tmp_path, settings, expire_after=60) as (_, streams):
        for i in range(5):
            await streams.append("s", str(i))
        await asyncio.sleep(200)
        with pytest.raises(StreamExpired, match=r"stream s has expired after event '1\.3\.s'"):
            await texts(streams, "s", after="1.3")
        assert await texts(streams, "s") == []
        assert await streams.append("s", "again") == "2.5.s"
        with pytest.raises(StreamExpired):
            await texts(streams, "s", after="1.3")
        assert await texts(streams, "s") == ["again"]
        assert await texts(streams, "s", after="2.4") == ["again"]


async def test_a_reader_of_a_stream_that_expires_meanwhile_gets_the_error(tmp_path):
    async with opened(tmp_path, {"lite_expiry_interval_ms": 5000}, expire_after=60) as (_, streams):
        await streams.append("s", "a")
        reading = streams.read("s")
        assert (await anext(reading)).text == "a"
        with pytest.raises(StreamExpired):
            await anext(reading)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("x", "this is not an event id"),
        ("1.2.s\n", "this is not an event id"),
        ("-1.2", "this is not an event id"),
        ("1.2.other", "it belongs to stream other"),
        ("1.1", "the newest event is 0"),
        ("1.999999999", "the newest event is 0"),
    ],
)
async def test_ids_of_other_streams_and_of_the_future_are_refused(tmp_path, given, why):
    async with opened(tmp_path) as (_, streams):
        await streams.append("s", "a")
        with pytest.raises(EventIdIllegal) as raised:
            await texts(streams, "s", after=given)
        said = f"stream s cannot be read after event {raised.value.event_id!r}: {why}; read it from its start"
        assert str(raised.value) == said


async def test_an_id_of_a_stream_that_never_was_is_an_expired_one(tmp_path):
    async with opened(tmp_path) as (_, streams):
        with pytest.raises(StreamExpired):
            await texts(streams, "none", after="7.3")


async def test_an_event_that_was_sent_twice_is_read_once(tmp_path):
    async with opened(tmp_path) as (_, streams):
        for text, key in (("a", "K1"), ("b", "K2"), ("a", "K1"), ("b", "K2"), ("c", "K3")):
            await streams._producer.send(Message(topic=PARENT, lite_topic="s", body=text.encode(), msg_id=key))
        assert await texts(streams, "s") == ["a", "b", "c"]
        for after, expected in (("1.0", ["b", "c"]), ("1.1", ["c"]), ("1.2", ["c"]), ("1.3", ["c"])):
            assert await texts(streams, "s", after=after) == expected


@pytest.mark.parametrize("name", ["", " ", "a b", "a$b", "a.b", "x" * 65, "ä"])
async def test_names_that_are_not_allowed(tmp_path, name):
    async with opened(tmp_path) as (_, streams):
        with pytest.raises(MessageIllegal):
            await streams.append(name, "x")
        with pytest.raises(MessageIllegal):
            streams.read(name)


async def test_events_without_content_and_with_reserved_headers_are_refused(tmp_path):
    async with opened(tmp_path) as (_, streams):
        with pytest.raises(MessageIllegal, match="no content"):
            await streams.append("s", "")
        with pytest.raises(MessageIllegal, match="belongs to rmqkit"):
            await streams.append("s", "x", headers={LAST: "true"})
        with pytest.raises(MessageIllegal):
            await streams.append("s", "x", headers={"TAGS": "x"})
        assert await streams.append("s", "y") == "1.0.s"


async def test_a_slow_broker_makes_writers_wait(tmp_path):
    async with opened(tmp_path, waiting_max=10) as (servers, streams):
        await streams.append("s", "first")
        await servers.stop_broker()
        appends = [asyncio.create_task(streams.append("s", str(i))) for i in range(100)]
        await asyncio.sleep(0.5)
        (lane,) = streams._writer._lanes.values()
        assert len(lane.waiting) <= 10
        await servers.start_broker()
        await asyncio.gather(*appends)
        assert await texts(streams, "s") == ["first", *map(str, range(100))]


async def test_linger_joins_events_into_one_request(tmp_path):
    async with opened(tmp_path, linger=0.05) as (_, streams):

        async def write(i):
            await asyncio.sleep(i * 0.001)
            return await streams.append("s", str(i))

        await asyncio.gather(*map(write, range(10)))
        assert await texts(streams, "s") == [str(i) for i in range(10)]


async def test_the_parent_is_created_once_with_its_lifetime(tmp_path):
    async with Servers(tmp_path) as servers:
        for lifetime, expected in ((timedelta(hours=1), "60"), (61, "2"), (None, "2")):
            async with rmqkit.streams.open(servers.address, PARENT, expire_after=lifetime):
                config = servers.broker.context.topics.get(PARENT)
                assert (config.attributes, config.write_queue_nums) == (
                    {"message.type": "LITE", "lite.topic.expiration": expected},
                    8,
                )


async def test_a_topic_of_another_type_is_no_parent(tmp_path):
    async with Servers(tmp_path) as servers:
        servers.broker.context.topics.put(TopicConfig("Plain", 1, 1))
        with pytest.raises(ClientError, match=r"topic Plain has message\.type=NORMAL, streams need LITE"):
            await rmqkit.streams.open(servers.address, "Plain")
        with pytest.raises(ClientError, match="topic Missing does not exist"):
            await rmqkit.streams.open(servers.address, "Missing", create=False)


@pytest.mark.parametrize("options", [{"expire_after": 0}, {"expire_after": 31 * 86_400}, {"waiting_max": 0}])
def test_refused_options(options):
    with pytest.raises(SettingsError):
        rmqkit.streams.open("127.0.0.1:1", PARENT, **options)


async def test_closed_streams_refuse_to_read_and_to_write(tmp_path):
    async with opened(tmp_path) as (_, streams):
        await streams.append("s", "x")
    with pytest.raises(ClientError, match="not open"):
        await streams.append("s", "x")
    with pytest.raises(ClientError, match="not open"):
        streams.read("s")


async def test_close_waits_for_events_under_way(tmp_path):
    async with Servers(tmp_path) as servers:
        streams = await rmqkit.streams.open(servers.address, PARENT)
        appends = [asyncio.create_task(streams.append("s", str(i))) for i in range(50)]
        await asyncio.sleep(0)
        await streams.close()
        assert len(await asyncio.gather(*appends)) == 50


async def test_too_many_streams_are_refused_and_existing_ones_go_on(tmp_path):
    store = StoreSettings(lite_topic_count_max=2)
    async with Standalone(tmp_path, store=store) as servers:
        streams = await rmqkit.streams.open(servers.namesrv_address, PARENT)
        await streams.append("a", "x")
        await streams.append("b", "x")
        with pytest.raises(PeerRefused) as raised:
            await streams.append("c", "x")
        assert raised.value.code == 2017
        await streams.append("a", "y")
        await streams.close()


async def test_embedded_streams_need_no_server_and_last(tmp_path):
    for expected in (["a"], ["a", "a"]):
        async with rmqkit.streams.embedded(tmp_path / "data") as streams:
            await streams.append("s", "a")
            assert await texts(streams, "s") == expected


async def test_a_second_user_of_a_folder_connects_to_the_first(tmp_path):
    async with AsyncExitStack() as stack:
        first, second = rmqkit.streams.embedded(tmp_path), rmqkit.streams.embedded(tmp_path)
        writer = await stack.enter_async_context(first)
        reader = await stack.enter_async_context(second)
        assert (first.is_owner, second.is_owner) == (True, False)
        await writer.append("s", "a")
        assert await texts(reader, "s") == ["a"]


async def test_a_user_of_a_folder_continues_when_another_process_runs_the_servers(tmp_path):
    async with AsyncExitStack() as stack:
        async with rmqkit.streams.embedded(tmp_path) as first:
            other = await stack.enter_async_context(rmqkit.streams.embedded(tmp_path))
            await first.append("s", "a")
            reading = other.read("s")
            assert (await anext(reading)).text == "a"
            following = asyncio.create_task(anext(reading))
            await asyncio.sleep(1)
        await asyncio.sleep(5)
        third = rmqkit.streams.embedded(tmp_path)
        writer = await stack.enter_async_context(third)
        assert third.is_owner
        await writer.append("s", "b")
        assert (await following).text == "b"
        await other.append("s", "c")
        assert await texts(writer, "s") == ["a", "b", "c"]


@pytest.mark.parametrize("found", ["taken", "", "nonsense", "127.0.0.1:0", "127.0.0.1:99999"])
async def test_a_port_that_is_taken_or_unknown_is_replaced(tmp_path, found):
    async with await asyncio.start_server(print, "127.0.0.1", 0) as taken:
        address = f"127.0.0.1:{taken.sockets[0].getsockname()[1]}" if found == "taken" else found
        (tmp_path / "streams.address").write_text(address)
        async with rmqkit.streams.embedded(tmp_path) as streams:
            await streams.append("s", "a")
            assert (tmp_path / "streams.address").read_text() not in ("", address)


def test_ids():
    assert event_id("s-1", Place(2, 3)) == "2.3.s-1"
    assert place_of("s-1", "2.3.s-1") == place_of("s-1", "2.3") == Place(2, 3)
    assert stream_of("2.3.s-1") == "s-1"
    assert Place(1, 9) < Place(2, 0) < Place(2, 1)
    for wrong in ("2.3", "", "1.2.", "1..s", "a.b.c", "1.2.a.b"):
        with pytest.raises(EventIdIllegal):
            stream_of(wrong)

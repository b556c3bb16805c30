"""The channel layer of Django Channels: what Channels expects of a layer, several processes, loops and kills."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from contextlib import asynccontextmanager, contextmanager

import pytest
from asgiref.sync import async_to_sync
from channels.exceptions import ChannelFull
from channels.layers import BaseChannelLayer

from rmqkit.channels import StreamChannelLayer
from rmqkit.errors import MessageIllegal, NoRoute, RmqError, SettingsError
from rmqkit.streams import Event
from tests.client.peers import standalone
from tests.streams.test_streams import Servers

HELLO = {"type": "test.message", "text": "Ahoy-hoy!", "bytes": b"\x00\xff", "more": [1, 2.5, None, {"a": True}]}


class Here:
    """A portal to the loop of the test, so that the layer is in virtual time."""

    def submit(self, work):
        return asyncio.run_coroutine_threadsafe(work(), asyncio.get_running_loop())

    def close_at_exit(self, client):
        pass


@pytest.fixture
def here(monkeypatch):
    monkeypatch.setattr("rmqkit.channels.layer.portal", Here)


@asynccontextmanager
async def layers(tmp_path, count=1, settings=None, **options):
    """Servers, and the layers of some processes."""
    async with Servers(tmp_path, **(settings or {})) as servers:
        found = [StreamChannelLayer(servers.address, **({"capacity": 3} | options)) for _ in range(count)]
        try:
            yield servers, *found
        finally:
            for one in found:
                await one.close()


async def waiting(layer, channel):
    """Return the numbers of the messages that wait in a channel or arrive within 5 s."""
    numbers = []
    try:
        async with asyncio.timeout(5):
            while True:
                numbers.append((await layer.receive(channel))["n"])
    except TimeoutError:
        return numbers


def message(n):
    return {"type": "message", "n": n}


# ---------------------------------------------------------------- what Channels expects


@pytest.mark.usefixtures("here")
async def test_a_message_is_sent_and_received(tmp_path):
    async with layers(tmp_path) as (_, layer):
        channel = await layer.new_channel()
        await layer.send(channel, HELLO)
        received = await layer.receive(channel)
        assert received == HELLO
        assert received is not HELLO


@pytest.mark.usefixtures("here")
async def test_a_channel_has_a_capacity(tmp_path):
    async with layers(tmp_path, channel_capacity={"small.*": 1}) as (_, layer):
        for prefix, capacity in (("specific", 3), ("small", 1)):
            channel = await layer.new_channel(prefix)
            for n in range(capacity):
                await layer.send(channel, message(n))
            with pytest.raises(ChannelFull):
                await layer.send(channel, message(9))
            assert await layer.receive(channel) == message(0)
            await layer.send(channel, message(9))


@pytest.mark.usefixtures("here")
async def test_messages_keep_their_order(tmp_path):
    async with layers(tmp_path) as (_, layer):
        channel = await layer.new_channel()
        for n in range(3):
            await layer.send(channel, message(n))
        assert await waiting(layer, channel) == [0, 1, 2]


@pytest.mark.usefixtures("here")
async def test_a_group_has_its_members_only(tmp_path):
    async with layers(tmp_path) as (_, layer):
        one, two, three, other = [await layer.new_channel() for _ in range(4)]
        for channel in (one, two, three):
            await layer.group_add("group", channel)
        await layer.group_discard("group", two)
        await layer.group_discard("group", other)
        await layer.group_discard("none", other)
        await layer.group_send("group", message(1))
        await layer.group_send("empty", message(2))
        assert [await waiting(layer, channel) for channel in (one, two, three, other)] == [[1], [], [1], []]


@pytest.mark.usefixtures("here")
async def test_full_channels_do_not_disturb_a_group(tmp_path):
    async with layers(tmp_path) as (_, layer):
        slow, fast = await layer.new_channel(), await layer.new_channel()
        await layer.group_add("group", slow)
        await layer.group_add("group", fast)
        for n in range(6):
            await layer.group_send("group", message(n))
            assert await layer.receive(fast) == message(n)
        assert await waiting(layer, slow) == [0, 1, 2]


@pytest.mark.usefixtures("here")
async def test_messages_expire(tmp_path):
    async with layers(tmp_path, expiry=60) as (_, layer):
        channel = await layer.new_channel()
        for n in range(3):
            await layer.send(channel, message(n))
        assert await layer.receive(channel) == message(0)
        await asyncio.sleep(59)
        assert await layer.receive(channel) == message(1)
        await asyncio.sleep(1.1)
        assert await waiting(layer, channel) == []
        await layer.send(channel, message(4))
        assert await waiting(layer, channel) == [4]


@pytest.mark.usefixtures("here")
async def test_a_channel_that_nobody_reads_leaves_its_groups_and_the_memory(tmp_path):
    async with layers(tmp_path, expiry=60) as (_, layer):
        read, unread = await layer.new_channel(), await layer.new_channel()
        for channel in (read, unread):
            await layer.group_add("group", channel)
        await layer.group_send("group", message(1))
        assert await waiting(layer, read) == [1]
        await asyncio.sleep(120)
        assert layer._inbox.channel_count == 0
        await layer.group_send("group", message(2))
        assert [await waiting(layer, channel) for channel in (read, unread)] == [[2], []]


@pytest.mark.usefixtures("here")
async def test_members_leave_a_group_after_its_expiry(tmp_path):
    async with layers(tmp_path, expiry=10, group_expiry=100) as (_, layer):
        old, new = await layer.new_channel(), await layer.new_channel()
        await layer.group_add("group", old)
        await asyncio.sleep(80)
        await layer.group_add("group", new)
        await asyncio.sleep(40)
        await layer.group_send("group", message(1))
        assert [await waiting(layer, channel) for channel in (old, new)] == [[], [1]]
        await asyncio.sleep(100)
        assert layer._exchange.group_count == 0


@pytest.mark.usefixtures("here")
async def test_a_flush_drops_messages_and_members(tmp_path):
    async with layers(tmp_path) as (_, layer):
        channel = await layer.new_channel()
        await layer.group_add("group", channel)
        await layer.send(channel, message(1))
        await layer.flush()
        await layer.group_send("group", message(2))
        assert await waiting(layer, channel) == []
        await layer.group_add("group", channel)
        await layer.group_send("group", message(3))
        assert await waiting(layer, channel) == [3]


@pytest.mark.usefixtures("here")
async def test_names_that_are_not_allowed(tmp_path):
    async with layers(tmp_path) as (_, layer):
        channel = await layer.new_channel()
        for name in ("", "a b", "ä", "x" * 100, 7, "a!b!c d"):
            for call in (layer.send(name, message(1)), layer.receive(name), layer.group_add("group", name)):
                with pytest.raises(TypeError):
                    await call
            if name != "a!b!c d":
                for call in (layer.group_add(name, channel), layer.group_send(name, message(1))):
                    with pytest.raises(TypeError):
                        await call
        for wrong in ("text", {"__asgi_channel__": "x"}):
            with pytest.raises(AssertionError):
                await layer.send(channel, wrong)
        assert isinstance(layer, BaseChannelLayer)
        assert set(layer.extensions) == {"groups", "flush"}


# ---------------------------------------------------------------- several processes


@pytest.mark.usefixtures("here")
async def test_a_message_reaches_a_channel_of_another_process(tmp_path):
    async with layers(tmp_path, 2) as (_, here, there):
        channel = await there.new_channel()
        for n in range(3):
            await here.send(channel, HELLO | {"n": n})
        assert await there.receive(channel) == HELLO | {"n": 0}
        assert await waiting(there, channel) == [1, 2]
        with pytest.raises(MessageIllegal, match="another process"):
            await here.receive(channel)


@pytest.mark.usefixtures("here")
async def test_a_channel_of_another_process_drops_what_exceeds_its_capacity(tmp_path):
    async with layers(tmp_path, 2) as (_, here, there):
        channel = await there.new_channel()
        for n in range(5):
            await here.send(channel, message(n))
        await asyncio.sleep(1)
        assert await waiting(there, channel) == [0, 1, 2]


@pytest.mark.usefixtures("here")
async def test_a_group_has_members_in_several_processes(tmp_path):
    async with layers(tmp_path, 3) as (_, *all_layers):
        channels = [(layer, await layer.new_channel()) for layer in all_layers for _ in range(2)]
        for layer, channel in channels[:4]:
            await layer.group_add("group", channel)
        for n in range(3):
            await all_layers[2].group_send("group", message(n))
        assert [await waiting(*one) for one in channels] == [[0, 1, 2]] * 4 + [[], []]


@pytest.mark.usefixtures("here")
async def test_a_member_gets_what_is_sent_after_it_joined(tmp_path):
    async with layers(tmp_path, 2) as (_, here, there):
        channel = await there.new_channel()
        await here.group_send("group", message(0))
        await there.group_add("group", channel)
        await here.group_send("group", message(1))
        assert await waiting(there, channel) == [1]
        await there.group_discard("group", channel)
        await here.group_send("group", message(2))
        await there.group_add("group", channel)
        await here.group_send("group", message(3))
        assert await waiting(there, channel) == [3]


@pytest.mark.usefixtures("here")
async def test_a_channel_of_another_process_joins_and_leaves_a_group(tmp_path):
    async with layers(tmp_path, 2) as (_, here, there):
        channel = await there.new_channel()
        await here.group_add("group", channel)
        await asyncio.sleep(1)
        await here.group_send("group", message(0))
        await asyncio.sleep(1)
        await here.group_discard("group", channel)
        await asyncio.sleep(1)
        await here.group_send("group", message(1))
        assert await waiting(there, channel) == [0]


@pytest.mark.usefixtures("here")
async def test_streams_without_messages_for_long_are_read_again(tmp_path):
    async with layers(tmp_path, 2, {"lite_expiry_interval_ms": 5000}) as (_, here, there):
        here._lifetime = there._lifetime = 60
        channel = await there.new_channel()
        await there.group_add("group", channel)
        for n in range(3):
            await here.group_send("group", message(n))
            await here.send(channel, message(n + 10))
            assert sorted(await waiting(there, channel)) == [n, n + 10]
            await asyncio.sleep(200)


@pytest.mark.usefixtures("here")
async def test_a_layer_continues_after_a_restart_of_the_broker(tmp_path):
    async with layers(tmp_path, 2) as (servers, here, there):
        channel = await there.new_channel()
        await there.group_add("group", channel)
        await servers.stop_broker()
        with pytest.raises(RmqError):
            await here.group_send("group", message(0))
        with pytest.raises(RmqError, match="no broker answered in 10 s"):
            await there.group_add("other", channel)
        await servers.start_broker()
        await here.group_send("group", message(1))
        assert await waiting(there, channel) == [1]


@pytest.mark.usefixtures("here")
async def test_a_layer_without_servers_reports_it_and_works_when_they_are_there(tmp_path):
    async with Servers(tmp_path) as servers:
        layer = StreamChannelLayer(servers.address)
        await servers.stop_broker()
        with pytest.raises(NoRoute):
            await layer.new_channel()
        await servers.start_broker()
        channel = await layer.new_channel()
        await layer.group_add("group", channel)
        await layer.group_send("group", message(1))
        assert await waiting(layer, channel) == [1]
        await layer.close()


@pytest.mark.usefixtures("here")
async def test_a_start_that_fails_leaves_no_connection_and_is_tried_again(tmp_path, monkeypatch):
    async with layers(tmp_path) as (_, layer):
        with monkeypatch.context() as patched:

            async def fail(self):
                raise NoRoute("no broker")

            patched.setattr("rmqkit.streams.reader.StreamReader.start", fail)
            with pytest.raises(NoRoute):
                await layer.new_channel()
            assert layer._exchange._opened is None
        channel = await layer.new_channel()
        await layer.group_add("group", channel)
        await layer.group_send("group", message(1))
        assert await waiting(layer, channel) == [1]


@pytest.mark.usefixtures("here")
async def test_a_message_that_arrives_after_its_expiry_is_dropped(tmp_path):
    async with layers(tmp_path, expiry=60) as (_, layer):
        channel = await layer.new_channel()
        await layer.group_add("group", channel)
        event = Event(id="1.0.x", stream="x", data=b"", headers={}, is_last=False, stored_ms=1_000_000)
        layer._exchange._put(channel, event, message(1))
        await asyncio.sleep(100)
        await layer.group_send("group", message(2))
        assert await waiting(layer, channel) == [2], "the channel is still in its group"


@pytest.mark.usefixtures("here")
async def test_events_that_are_no_messages_are_skipped(tmp_path, caplog):
    async with layers(tmp_path) as (_, layer):
        channel = await layer.new_channel()
        await layer.group_add("group", channel)
        streams = await layer._exchange.open()
        await streams.append("g-group", b"\xc1")
        await streams.append(f"p-{layer._process}", "x")
        await layer.group_send("group", message(1))
        assert await waiting(layer, channel) == [1]
        assert len([one for one in caplog.messages if "is no message" in one]) == 2


@pytest.mark.parametrize("channel", ["general", "a!", "!b", ".!b"])
@pytest.mark.usefixtures("here")
async def test_channels_without_a_process_are_refused(tmp_path, channel):
    async with layers(tmp_path) as (_, layer):
        for call in (layer.send(channel, message(1)), layer.receive(channel), layer.group_add("group", channel)):
            with pytest.raises((MessageIllegal, TypeError)):
                await call


@pytest.mark.usefixtures("here")
async def test_values_that_cannot_be_stored_are_refused(tmp_path):
    async with layers(tmp_path) as (_, layer):
        for value in (object(), 1 << 80):
            with pytest.raises(MessageIllegal, match="cannot be stored"):
                await layer.group_send("group", {"value": value})


@pytest.mark.usefixtures("here")
async def test_a_cancelled_receiver_loses_no_message(tmp_path):
    async with layers(tmp_path, capacity=100) as (_, layer):
        channel = await layer.new_channel()
        received = []
        for n in range(50):
            receiving = asyncio.create_task(layer.receive(channel))
            other = asyncio.create_task(layer.receive(channel))
            for _ in range(n % 7):
                await asyncio.sleep(0)
            await layer.send(channel, message(n))
            for _ in range(n % 5):
                await asyncio.sleep(0)
            receiving.cancel()
            for one in await asyncio.gather(receiving, return_exceptions=True):
                received += [one["n"]] if isinstance(one, dict) else []
            if len(received) <= n:
                received.append((await other)["n"])
            else:
                other.cancel()
        assert received == list(range(50))
        await asyncio.sleep(1)
        assert layer._inbox.channel_count == 0


@pytest.mark.parametrize(
    "options",
    [
        {"name_servers": "h:1", "expiry": 0},
        {"name_servers": "h:1", "capacity": 0},
        {"name_servers": "h:1", "group_expiry": -1},
        {"name_servers": "h:1", "folder": "x"},
        {"name_servers": "h:1", "parent": "a b"},
    ],
)
def test_refused_options(options):
    with pytest.raises(SettingsError):
        StreamChannelLayer(**options)


# ---------------------------------------------------------------- loops and processes

CHILD = """
import asyncio, sys
from rmqkit.channels import StreamChannelLayer

async def main():
    layer = StreamChannelLayer(sys.argv[1])
    channel = await layer.new_channel()
    await layer.group_add("group", channel)
    await layer.send(sys.argv[2], {"type": "joined", "channel": channel})
    message = await layer.receive(channel)
    await layer.send(sys.argv[2], {"type": "got", "n": message["n"]})

asyncio.run(main())
"""


@contextmanager
def child(*arguments):
    process = subprocess.Popen([sys.executable, "-c", CHILD, *arguments])
    try:
        yield
    finally:
        process.kill()
        process.wait()


@pytest.mark.real_time
async def test_processes_and_threads_share_a_group(tmp_path):
    with standalone(tmp_path) as address:
        layer = StreamChannelLayer(address)
        channel = await layer.new_channel()
        with child(address, channel):
            async with asyncio.timeout(60):
                assert (await layer.receive(channel))["type"] == "joined"
                sending = threading.Thread(target=async_to_sync(layer.group_send), args=("group", message(7)))
                sending.start()
                assert await layer.receive(channel) == {"type": "got", "n": 7}
                sending.join()
        await layer.close()

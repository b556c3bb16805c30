"""A master with a small store on a loopback port, and slaves that the test plays."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import pairwise

from rmqkit.broker.replication.master import HaMaster
from rmqkit.broker.settings import BrokerSettings
from rmqkit.protocol.ha import encode_report, split_frames
from rmqkit.store.message_store import MessageStore, PutStatus
from rmqkit.testing.clock import StandingClock
from tests.store.stores import message, small_settings
from tests.waiting import until as until

SOME_TURNS = 20


async def turns():
    """Let the loop run the callbacks that are due now."""
    for _ in range(SOME_TURNS):
        await asyncio.sleep(0)


class Slave(asyncio.Protocol):
    """The other end of a link: it collects the received frames, and sends the reports that the test wants."""

    def __init__(self):
        self.received = bytearray()
        self.frames: list[tuple[int, bytes]] = []
        self.is_open = False

    def connection_made(self, transport):
        self.transport, self.is_open = transport, True

    def connection_lost(self, exc):
        self.is_open = False

    async def close(self):
        """Close the transport. If it is still open when the loop closes, some later test gets a ResourceWarning."""
        self.transport.abort()
        await until(lambda: not self.is_open)

    def data_received(self, data):
        self.received += data
        frames, used = split_frames(memoryview(bytes(self.received)))
        self.frames += [(offset, bytes(one)) for offset, one in frames]
        del self.received[:used]

    def report(self, offset):
        self.transport.write(encode_report(offset))

    def send(self, data):
        self.transport.write(data)

    @property
    def log(self):
        """The data of all frames, which must follow each other."""
        data = [(offset, one) for offset, one in self.frames if one]
        for (offset, one), (following, _) in pairwise(data):
            assert offset + len(one) == following
        return b"".join(one for _, one in data)

    @property
    def heartbeats(self):
        return [offset for offset, one in self.frames if not one]

    async def has(self, size):
        await until(lambda: len(self.log) >= size)
        assert len(self.log) == size
        return self.log


class Master:
    """A store, a `HaMaster` over it, its port, and the number of reported copies."""

    def __init__(self, root, clock, settings, store_settings, ask_members, tls):
        self.clock = clock
        self.settings = BrokerSettings(**settings)
        loop = asyncio.get_running_loop()
        self.store = MessageStore(
            root,
            store_settings,
            clock=clock,
            on_arrival=lambda arrivals: self.ha.advanced(),
            on_durable=lambda *_: loop.call_soon_threadsafe(self.store.dispatch),
            is_batch_topic=lambda topic: topic == "GoldInnerBatch",
        )
        self.acked = 0
        self.slaves: list[Slave] = []
        self.ha = HaMaster(self.store, self.settings, clock, self._acked, ask_members=ask_members, tls=tls)
        self.port = 0

    def _acked(self):
        self.acked += 1

    def put(self, body=b"x" * 100, **fields):
        put = self.store.put(message(body=body, **fields))
        assert put.status is PutStatus.OK
        return put.end_offset

    def log(self, start=0):
        """The dispatched part of the log from an offset on."""
        data, end = b"", self.store.dispatched_offset
        while start + len(data) < end:
            data += self.store.log_part(start + len(data), 1 << 20)
        return data

    async def slave(self, report=None, *, host="127.0.0.1"):
        """Return a new link from an address of this machine."""
        loop = asyncio.get_running_loop()
        _, slave = await loop.create_connection(Slave, "127.0.0.1", self.port, local_addr=(host, 0))
        self.slaves.append(slave)
        if report is not None:
            acked = self.acked
            slave.report(report)
            await until(lambda: self.acked > acked or not slave.is_open)
        return slave

    async def close_slaves(self):
        for slave in self.slaves:
            await slave.close()

    @property
    def links(self):
        return self.ha.copies.status().ha_connection_info


@asynccontextmanager
async def master(root, *, clock=None, store=None, bind="127.0.0.1", port=0, ask_members=None, tls=None, **settings):
    """Yield a running master. All links are closed at the end."""
    async with AsyncExitStack() as stack:
        it = Master(root, clock or StandingClock(), settings, store or small_settings(), ask_members, tls)
        it.store.open()
        stack.callback(it.store.close)
        it.port = await it.ha.start(bind, port)
        stack.push_async_callback(it.close_slaves)
        stack.push_async_callback(it.ha.close)
        yield it
        for link in it.links:
            assert link.transfer_from_where <= it.store.dispatched_offset

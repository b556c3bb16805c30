"""Connections of a simulated network, and their faults."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from rmqkit.remoting.listening import ListenFailed, ListeningPort
from rmqkit.testing.simulation import World

PORT = 5000


class Recorder(asyncio.Protocol):
    """One end of a connection, which remembers everything."""

    def __init__(self) -> None:
        self.data = b""
        self.reads = 0
        self.lost: list[Exception | None] = []
        self.paused = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.data += data
        self.reads += 1

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.append(exc)

    def pause_writing(self) -> None:
        self.paused += 1


class Pair:
    """A server and a client on two machines; the client runs a coroutine with its transport."""

    def __init__(self, world: World, work: Callable[[asyncio.Transport], Awaitable[None]]) -> None:
        self.world, self.work = world, work
        self.hosts = world.machine("server").host, world.machine("client").host
        self.accepted: list[Recorder] = []
        self.client: Recorder | None = None
        self.failure: OSError | None = None
        self.server_process = world.process("server", self._serve)
        self.client_process = world.process("client", self._talk)

    def _accept(self) -> Recorder:
        self.accepted.append(Recorder())
        return self.accepted[-1]

    async def _serve(self) -> None:
        port = await ListeningPort.bind(self._accept, self.hosts[0], PORT)
        await port.open()
        await asyncio.sleep(10_000)

    async def _talk(self) -> None:
        await asyncio.sleep(0.1)
        loop = asyncio.get_running_loop()
        try:
            transport, self.client = await loop.create_connection(Recorder, self.hosts[0], PORT)
        except OSError as error:
            self.failure = error
            return
        await self.work(transport)
        await asyncio.sleep(1000)


async def write_hundred(transport: asyncio.Transport) -> None:
    for number in range(100):
        transport.write(b"%03d" % number)
        await asyncio.sleep(0.01)


HUNDRED = b"".join(b"%03d" % number for number in range(100))


@pytest.mark.parametrize("seed", range(5))
def test_a_stream_arrives_whole_and_in_order(seed: int) -> None:
    with World(seed) as world:
        pair = Pair(world, write_hundred)
        world.run(until=10)
        assert pair.accepted[0].data == HUNDRED


def test_a_stall_holds_one_direction_and_then_everything_arrives_in_order() -> None:
    with World(1) as world:
        pair = Pair(world, write_hundred)
        world.at(0.3, lambda: world.network.stall(pair.hosts[1], pair.hosts[0], 5))
        world.run(until=4)
        held = len(pair.accepted[0].data)
        assert 0 < held < len(HUNDRED)
        world.run(until=6)
        assert pair.accepted[0].data == HUNDRED
        assert pair.accepted[0].lost == []


def test_a_cut_resets_both_ends_and_may_lose_the_end_of_the_stream() -> None:
    with World(1) as world:
        pair = Pair(world, write_hundred)
        world.at(0.5, lambda: world.network.cut(*pair.hosts))
        world.run(until=10)
        assert pair.client is not None
        assert [type(error) for error in pair.client.lost] == [ConnectionResetError]
        assert [type(error) for error in pair.accepted[0].lost] == [ConnectionResetError]
        assert HUNDRED.startswith(pair.accepted[0].data)
        assert len(pair.accepted[0].data) < len(HUNDRED)


def test_a_killed_process_resets_its_connections_and_frees_its_port() -> None:
    with World(1) as world:
        pair = Pair(world, write_hundred)
        world.at(0.5, pair.server_process.kill)
        world.run(until=5)
        assert pair.client is not None
        assert [type(error) for error in pair.client.lost] == [ConnectionResetError]
        again = world.process("server", pair._serve)
        world.run(until=6)
        assert again.error is None


def test_a_machine_without_power_says_nothing_until_it_runs_again() -> None:
    async def write_for_long(transport: asyncio.Transport) -> None:
        for _ in range(30):
            transport.write(b"x")
            await asyncio.sleep(1)

    with World(1) as world:
        pair = Pair(world, write_for_long)
        world.at(5, world.machine("server").lose_power)
        world.run(until=15)
        assert pair.client is not None
        assert pair.client.lost == []
        world.process("server", lambda: asyncio.sleep(100))
        world.run(until=20)
        assert [type(error) for error in pair.client.lost] == [ConnectionResetError]


def test_nobody_listens_or_the_host_refuses() -> None:
    with World(1) as world:
        world.network.refuse(world.machine("server").host, 5)
        pair = Pair(world, write_hundred)
        world.run(until=2)
        assert isinstance(pair.failure, ConnectionRefusedError)


def test_a_reader_that_stops_reading_stops_its_writer() -> None:
    async def write_much(transport: asyncio.Transport) -> None:
        for _ in range(100):
            transport.write(bytes(10_000))
            await asyncio.sleep(0.001)

    with World(1) as world:
        pair = Pair(world, write_much)
        world.run(until=0.11, unless=lambda: bool(pair.accepted))
        pair.accepted[0].transport.pause_reading()  # type: ignore[attr-defined]
        world.run(until=5)
        assert pair.client is not None
        assert pair.client.paused == 1
        assert len(pair.accepted[0].data) < 300_000
        world.at(6, pair.accepted[0].transport.resume_reading)  # type: ignore[attr-defined]
        world.run(until=20)
        assert len(pair.accepted[0].data) == 1_000_000


def test_a_port_is_bound_once_and_only_on_its_own_machine() -> None:
    errors: list[str] = []

    async def bind(host: str) -> None:
        for _ in range(2):
            try:
                await ListeningPort.bind(Recorder, host, PORT)
            except ListenFailed as error:
                errors.append(str(error))

    with World(1) as world:
        own, other = world.machine("a").host, world.machine("b").host
        world.process("a", lambda: bind(own))
        world.run(until=1)
        assert len(errors) == 1
        world.process("b", lambda: bind(own))
        world.run(until=2)
        assert len(errors) == 3
        assert other not in "".join(errors)


def test_a_closed_connection_gives_what_was_written_and_then_its_end() -> None:
    async def write_and_close(transport: asyncio.Transport) -> None:
        transport.write(b"all of it")
        transport.close()
        transport.write(b"too late")

    with World(1) as world:
        pair = Pair(world, write_and_close)
        world.run(until=5)
        assert pair.accepted[0].data == b"all of it"
        assert pair.accepted[0].lost == [None]
        assert world.network.connections == 0

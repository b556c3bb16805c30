"""A broker stops in one order, even if a step fails or its start was incomplete."""

from __future__ import annotations

import asyncio
import inspect
from functools import partial
from types import SimpleNamespace

import pytest
import uvloop

from rmqkit.broker import server
from rmqkit.broker.context import BrokerContext, Lifecycle, Stage
from rmqkit.broker.server import Broker
from rmqkit.broker.settings import BrokerRole, BrokerSettings
from rmqkit.errors import StoreUnavailable
from rmqkit.remoting.listening import ListenFailed
from rmqkit.store.message_store import MessageStore
from rmqkit.store.settings import StoreSettings
from tests.ports import free_port

MASTER_STOPS = [
    (Stage.ROUNDS, "CheckBack.stop"),
    (Stage.SERVICES, "LiteService.close"),
    (Stage.SERVICES, "Schedule.stop"),
    (Stage.SERVICES, "PopService.close"),
    (Stage.SERVICES, "Timer.stop"),
    (Stage.REGISTRATION, "Registration.stop"),
    (Stage.CLIENTS, "Broker._drain"),
    (Stage.CLIENTS, "LongPolling.close"),
    (Stage.CLIENTS, "RemotingClient.close"),
    (Stage.PORTS, "RemotingServer.close"),
    (Stage.REPLICATION, "HaMaster.close"),
    (Stage.TABLES, "BrokerContext.persist"),
    (Stage.OP_MESSAGES, "OpMessages.write"),
    (Stage.STORE, "MessageStore.close"),
    (Stage.DELIVERED, "BrokerContext.persist_delivered"),
]
SLAVE_STOPS = [
    (Stage.SERVICES, "LiteService.close"),
    (Stage.SERVICES, "SlaveRole.close"),
    (Stage.SERVICES, "Timer.stop"),
    (Stage.REGISTRATION, "Registration.stop"),
    (Stage.CLIENTS, "Broker._drain"),
    (Stage.CLIENTS, "LongPolling.close"),
    (Stage.CLIENTS, "RemotingClient.close"),
    (Stage.PORTS, "RemotingServer.close"),
    (Stage.TABLES, "BrokerContext.persist"),
    (Stage.STORE, "MessageStore.close"),
    (Stage.DELIVERED, "BrokerContext.persist_delivered"),
]


class Faulty(Lifecycle):
    """Records the stopped parts. ``fails_to_stop``: the stop that raises. ``fails_to_start``: the step that raises."""

    def __init__(self, *, fails_to_stop: int = -1, fails_to_start: int = -1) -> None:
        super().__init__()
        self.registered = 0
        self.stopped: list[tuple[Stage, str]] = []
        self.fails_to_stop = fails_to_stop
        self.fails_to_start = fails_to_start

    def on_stop(self, stage, stop):
        number, self.registered = self.registered, self.registered + 1
        super().on_stop(stage, partial(self._note, number, stage, stop))
        if number == self.fails_to_start:
            raise ArithmeticError("a fault of the start")

    async def _note(self, number, stage, stop):
        name = (stop.func if isinstance(stop, partial) else stop).__qualname__
        self.stopped.append((stage, name))
        done = stop()
        if inspect.isawaitable(done):
            await done
        if number == self.fails_to_stop:
            raise ArithmeticError(name)


def broker(root, lifecycle, monkeypatch, **settings):
    monkeypatch.setattr(server, "Lifecycle", lambda: lifecycle)
    own = BrokerSettings(listen_port=0, bind_address="127.0.0.1", broker_name="a", **settings)
    return Broker(own, StoreSettings(commit_log_file_bytes=1 << 16), root)


def without_rounds(table):
    """Return the table without the stops of periodic work, which `Lifecycle.every` registers."""
    return [row for row in table if "every" not in row[1]]


@pytest.mark.parametrize(
    ("settings", "stops"),
    [
        pytest.param({}, MASTER_STOPS, id="master"),
        pytest.param({"broker_role": BrokerRole.SLAVE, "broker_id": 1}, SLAVE_STOPS, id="slave"),
    ],
)
async def test_the_order_of_a_stop_is_this_table(tmp_path, monkeypatch, settings, stops):
    lifecycle = Faulty()
    it = broker(tmp_path, lifecycle, monkeypatch, **settings)
    await it.start()
    await it.stop()
    assert without_rounds(lifecycle.stopped) == stops
    assert [stage for stage, _ in lifecycle.stopped] == sorted(stage for stage, _ in lifecycle.stopped)


@pytest.mark.parametrize("is_flushed", [True, False])
async def test_consumer_offsets_are_written_only_when_the_log_is_on_the_disk(tmp_path, monkeypatch, is_flushed):
    monkeypatch.setattr(MessageStore, "flush_log", lambda store: is_flushed)
    one = broker(tmp_path, Lifecycle(), monkeypatch)
    await one.start()
    one.context.offsets.commit("g", "T", 0, 5)
    await one.stop()
    assert (tmp_path / "config" / "consumerOffset.json").exists() == is_flushed


async def test_a_step_that_fails_keeps_no_other_from_being_done(tmp_path, monkeypatch):
    sound = Faulty()
    it = broker(tmp_path, sound, monkeypatch)
    await it.start()
    await it.stop()
    for number in range(sound.registered):
        lifecycle = Faulty(fails_to_stop=number)
        it = broker(tmp_path, lifecycle, monkeypatch)
        await it.start()
        with pytest.raises(ArithmeticError):
            await it.stop()
        assert lifecycle.stopped == sound.stopped


async def test_a_start_that_fails_at_any_step_leaves_a_closed_store(tmp_path, monkeypatch):
    sound = Faulty()
    it = broker(tmp_path, sound, monkeypatch)
    await it.start()
    await it.stop()
    for number in range(sound.registered):
        lifecycle = Faulty(fails_to_start=number)
        it = broker(tmp_path, lifecycle, monkeypatch)
        with pytest.raises(ArithmeticError, match="a fault of the start"):
            await it.start()
        names = [name for _, name in without_rounds(lifecycle.stopped)]
        if "MessageStore.close" in names:
            assert set(names[names.index("MessageStore.close") + 1 :]) <= {"BrokerContext.persist_delivered"}
        assert len(lifecycle.stopped) == number + 1
    again = broker(tmp_path, Faulty(), monkeypatch)
    await again.start()  # the lock of the store is free, and nothing in it is damaged
    await again.stop()


async def test_a_round_under_way_ends_before_the_stop_continues():
    lifecycle, did, may_end = Lifecycle(), [], asyncio.Event()

    async def work():
        did.append("begun")
        await may_end.wait()
        did.append("ended")

    lifecycle.every(0.001, work, "work", 0.0)
    lifecycle.on_stop(Stage.STORE, lambda: did.append("closed"))
    while not did:
        await asyncio.sleep(0)
    stopping = asyncio.create_task(lifecycle.stop())
    await asyncio.sleep(0)
    may_end.set()
    await stopping
    assert did == ["begun", "ended", "closed"]


def test_a_table_that_cannot_be_written_keeps_no_other_from_it():
    written = []

    class Table:
        def __init__(self, name):
            self.name = name

        def persist(self):
            written.append(self.name)
            if self.name in ("pop", "topics"):
                raise StoreUnavailable(self.name)

    names = ["pop", "topics", "groups", "offsets", "filters"]
    with pytest.raises(StoreUnavailable):
        BrokerContext.persist(SimpleNamespace(**{name: Table(name) for name in names}))
    assert written == names


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_of_two_brokers_that_start_together_with_one_port_in_common_one_fails(tmp_path, run):
    port = free_port(-2, -1, 1, 2)

    def broker(name, listen_port, ha_port):
        ports = {"listen_port": listen_port, "ha_listen_port": ha_port}
        settings = BrokerSettings(broker_name=name, broker_ip1="127.0.0.1", bind_address="127.0.0.1", **ports)
        return Broker(settings, StoreSettings(), tmp_path / name)

    async def scenario():
        # The HA port of the first is the port of the second.
        brokers = [broker("a", port, port + 1), broker("b", port + 1, port + 2)]
        started = await asyncio.gather(*(one.start() for one in brokers), return_exceptions=True)
        refused = [one for one in started if one is not None]
        assert [type(one) for one in refused] == [ListenFailed], started
        assert f"127.0.0.1:{port + 1}" in str(refused[0])
        await brokers[started.index(None)].stop()

    run(scenario())

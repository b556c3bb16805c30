"""Connections between clients and their broker that are cut in the middle of frames, slow, silent, or garbled."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from rmqkit.protocol.command import RESPONSE, Command, FrameSplitter, decode_command, decode_fields, encode_command
from tests.client.peers import until
from tests.examples import chosen_seed
from tests.faults.client.proxy import Cut, Dials, Proxy
from tests.faults.client.servers import PROXIED_HOST, Servers
from tests.faults.client.trial import CONF, Trial, on_real_loop

pytestmark = [pytest.mark.faults, pytest.mark.slow]

CUTS = 30
CUT_BYTES_MAX = 20_000


@contextlib.asynccontextmanager
async def proxied(folder: Path) -> AsyncIterator[tuple[Servers, Proxy]]:
    """Start servers, and a proxy through which clients reach the broker."""
    async with Servers(folder, conf=CONF, is_proxied=True) as servers:
        port = int(servers.broker.address.rpartition(":")[2])
        async with Proxy(servers.broker_target, PROXIED_HOST, port) as proxy:
            yield servers, proxy


@on_real_loop
async def test_connections_cut_in_the_middle_of_frames_cost_no_message(tmp_path: Path) -> None:
    seed = chosen_seed()
    chance = random.Random(seed)
    async with proxied(tmp_path) as (servers, proxy):
        async with Trial(servers.namesrv_addr) as trial:
            async with trial.outage():
                first = proxy.connections
                proxy.dials.cut = lambda: Cut.any(chance, CUT_BYTES_MAX)
                proxy.break_all()
                await until(lambda: proxy.connections - first >= CUTS, f"{CUTS} connections")
                proxy.dials = Dials()
            await trial.arrivals(60)
            await trial.settle()
        trial.judge()
    for to_client, cuts in proxy.cuts.items():
        inside = sum(at > 0 for at in cuts)
        print(f"{len(cuts)} cuts {'to the client' if to_client else 'to the broker'}, {inside} of them inside a frame")
        assert inside >= 3


@on_real_loop
async def test_a_slow_broker_is_waited_for(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (servers, proxy):
        async with Trial(servers.namesrv_addr, patient=True) as trial:
            proxy.dials = Dials(delay_seconds=0.1)
            await trial.arrivals(20)
            proxy.dials = Dials(bytes_per_second=20_000)
            await trial.arrivals(20)
            proxy.dials = Dials()
            await trial.settle()
        trial.judge(in_doubt_max=0)


@on_real_loop
async def test_a_broker_slower_than_the_time_outs_fails_sends_and_loses_nothing(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (servers, proxy):
        async with Trial(servers.namesrv_addr) as trial:
            async with trial.outage():
                proxy.dials = Dials(delay_seconds=2.0)
                await trial.work(2.5)
                proxy.dials = Dials()
            await trial.arrivals(60)
            await trial.settle()
        trial.judge()
        assert any("did not answer" in str(error) for error in trial.ledger.in_doubt.values())


@on_real_loop
async def test_silent_connections_are_given_up_for_new_ones(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (servers, proxy):
        async with Trial(servers.namesrv_addr) as trial:
            async with trial.outage():
                proxy.dials = Dials(is_black_hole=True)
                await trial.work(2)
                proxy.dials = Dials()
            await trial.arrivals(60)
            await trial.settle()
        trial.judge()


class Nonsense:
    """Replaces some answers of a broker by frames that are obviously invalid."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._splitter = FrameSplitter()
        self.made: Counter[str] = Counter()

    def __call__(self, data: bytes) -> bytes:
        commands = [decode_command(frame) for frame in self._splitter.feed(data)]
        return b"".join(b"".join(encode_command(self._answer(command))) for command in commands)

    def _answer(self, answer: Command) -> Command:
        if not answer.flag & RESPONSE or self._chance.random() < 0.5:
            return answer
        kind = self._chance.choice(["fields", "numbers", "code", "bytes", "cut", "opaque"])
        fields, body = decode_fields(answer), answer.payload
        if kind == "fields" and fields:
            answer.fields = None
        elif kind == "numbers" and fields:
            answer.fields = dict.fromkeys(fields, "many")
        elif kind == "bytes" and body:
            answer.body = self._chance.randbytes(len(body))
        elif kind == "cut" and body:
            answer.body = body[:-3]
        elif kind == "opaque":
            answer.opaque += 1 << 20
        else:
            kind, answer.code = "code", 9999
        self.made[kind] += 1
        return answer


@on_real_loop
@pytest.mark.parametrize("is_framed", [False, True], ids=["no frames", "frames"])
async def test_answers_that_make_no_sense_cost_no_message(tmp_path: Path, is_framed: bool) -> None:
    seed = chosen_seed()
    chance, nonsense = random.Random(seed), []

    def garble() -> Callable[[bytes], bytes]:
        if not is_framed:
            return lambda data: chance.randbytes(len(data))
        nonsense.append(Nonsense(chance))
        return nonsense[-1]

    async with proxied(tmp_path) as (servers, proxy):
        async with Trial(servers.namesrv_addr) as trial:
            async with trial.outage():
                proxy.dials = Dials(garble=garble)
                proxy.break_all()
                await trial.work(1.5)
                proxy.dials = Dials()
                proxy.break_all()
            await trial.arrivals(60)
            await trial.settle()
        trial.judge()
    made: Counter[str] = sum((one.made for one in nonsense), Counter())
    print(f"answers that made no sense: {dict(made)}")
    assert not is_framed or len(made) >= 4

"""Measures a broker's handling of sends from the socket's bytes to its answer, with the compiled core and without, in
one run. Prints JSON: the CPU microseconds for a message of 1 KiB, the best of the rounds. There are no sockets, and no
system calls except the writes of the log and the queues.

    python bench/core_bench.py --rounds 5
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from rmqkit.broker.send.handler import SendHandlers
from rmqkit.broker.settings import BrokerSettings
from rmqkit.clock import SYSTEM_CLOCK
from rmqkit.core import CORE
from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.command import FrameSplitter, decode_command, encode_command, request
from rmqkit.protocol.record import BatchEntry, encode_batch
from rmqkit.protocol.schemas.send import SendMessageV2Request
from rmqkit.remoting.router import Router
from rmqkit.standalone import Standalone
from rmqkit.store.settings import StoreSettings

PROPERTIES = "UNIQ_KEY\x01{0:032X}\x02KEYS\x01order-{0}\x02WAIT\x01true\x02TAGS\x01TagA"
LATER_MS = (int(time.time()) + 100_000) * 1000
LOADS = {"1 a read": 1, "8 a read": 8, "64 a read": 64}
MESSAGES = 4_000


class Peer:
    """A connection that drops answers."""

    peer, peer_host, hops = "10.0.0.1:5", bytes.fromhex("0a000001 00000005"), ()

    def __init__(self) -> None:
        self.active_ms = 0.0

    def send(self, answer: object) -> None:
        """Drop the answer."""

    send_frame = send

    def hold(self) -> None:
        """Do nothing: long batches pause reading."""

    go_on = hold


def frame(
    number: int, body: bytes, properties: str = "", code: int = RequestCode.SEND_MESSAGE_V2, topic: str = "T"
) -> bytes:
    """Return one request as encoded bytes."""
    text = PROPERTIES.format(number) + properties
    header = SendMessageV2Request("p", topic, "TBW102", 4, number % 4, 0, 1_700_000_000_000 + number, 0, text, 0, False)
    header.batch = code == RequestCode.SEND_BATCH_MESSAGE
    command = request(code, header, body)
    command.opaque = number
    return b"".join(bytes(piece) for piece in encode_command(command))


def reads() -> Iterator[tuple[str, list[bytes], int]]:
    """Yield name, data of each read, and number of messages."""
    body = bytes(range(256)) * 4
    for name, count in LOADS.items():
        starts = range(0, MESSAGES, count)
        yield name, [b"".join(frame(at, body) for at in range(start, start + count)) for start in starts], count
    members = encode_batch([BatchEntry(body, PROPERTIES.format(at).encode(), 0) for at in range(32)])
    yield "batch of 32", [frame(at, members, code=RequestCode.SEND_BATCH_MESSAGE) for at in range(MESSAGES // 32)], 32
    for name, count in LOADS.items():
        lites = [frame(at, body, f"\x02{_lite(at)}", topic="Parent") for at in range(MESSAGES)]
        yield f"lite, {name}", [b"".join(lites[at : at + count]) for at in range(0, MESSAGES, count)], count
    batches = []
    for number in range(MESSAGES // 32):
        entries = [BatchEntry(body, f"{PROPERTIES.format(at)}\x02{_lite(number)}".encode(), 0) for at in range(32)]
        code = RequestCode.SEND_BATCH_MESSAGE
        batches.append(frame(number, encode_batch(entries), code=code, topic="Parent"))
    yield "lite, batch of 32", batches, 32
    for name, asks in {"delay level": "\x02DELAY\x013", "timed": f"\x02TIMER_DELIVER_MS\x01{LATER_MS}"}.items():
        yield name, [frame(at, body, asks) for at in range(MESSAGES // 4)], 1


def _lite(number: int) -> str:
    return f"__LITE_TOPIC\x01session-{number % 64}\x02"


async def measure(folder: Path, rounds: int) -> dict[str, float]:
    """Return load → microseconds of CPU per message."""
    best: dict[str, float] = {}
    store = StoreSettings(commit_log_file_bytes=256 << 20, flush_interval_ms=60_000)
    settings = BrokerSettings(listen_port=0, bind_address="127.0.0.1")
    async with Standalone(folder, broker=settings, store=store) as cluster:
        context = cluster.broker.context
        context.topics.ensure("T", 4)
        context.topics.ensure("Parent", 4).attributes = {"message.type": "LITE"}
        router, peer = Router(), Peer()
        SendHandlers(context).register(router)
        router.batch = context.store.batch
        splitter = FrameSplitter(sends=router.sends)
        loads = list(reads())
        gc.collect()
        gc.freeze()
        for at in range(rounds + 1):
            for name, chunks, count in loads:
                started = time.thread_time_ns()
                for chunk in chunks:
                    _handle(router, splitter, peer, chunk)
                spent_us = (time.thread_time_ns() - started) / 1000 / (len(chunks) * count)
                if at:  # the first round warms up
                    best[name] = round(min(best.get(name, spent_us), spent_us), 2)
                await asyncio.sleep(0)
    return best


def _handle(router: Router, splitter: FrameSplitter, peer: Any, chunk: bytes) -> None:
    peer.active_ms = SYSTEM_CLOCK.monotonic_ms()
    units = splitter.feed(chunk)
    with router.batch() if router.batch is not None and len(units) > 1 else nullcontext():
        for one in router.remaining(peer, units):
            router.handle(peer, decode_command(one))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    figures: dict[str, Any] = {}
    for name, fault in {"compiled core": CORE.fault, "plain Python": "asked for"}.items():
        if name == "compiled core" and fault:
            figures[name] = fault
            continue
        CORE.fault = fault
        with tempfile.TemporaryDirectory(prefix="rmq-bench-") as folder:
            figures[name] = asyncio.run(measure(Path(folder), arguments.rounds))
    print(json.dumps({"bench": "core", "unit": "us of CPU a message", "figures": figures}, indent=1))


if __name__ == "__main__":
    main()

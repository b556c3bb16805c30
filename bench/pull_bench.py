"""The cost of a pull in the broker, and of waiting pulls for a send: one JSON object (no sockets, one process, CPU
time).

| Figure | Measured work |
|---|---|
| ``pull_32_us`` | checks, read and answer of a pull of 32 messages of 1 KiB, inline subscription |
| ``pull_32_registered_us`` | the same with the subscription of a heartbeat |
| ``pull_sql_us`` | the same with an SQL92 expression that matches every message |
| ``sql_verdict_us`` | one message through ``a > 5 AND region = 'hangzhou'`` |
| ``send_us`` | a send, with checks and answer, that ends a pull waiting on its queue; alone and in a crowd, in turn |

The crowd is 10,000 pulls waiting on other queues, 1,000 consumer groups on the topic of the sends, or both.

Usage: ``python bench/pull_bench.py [--rounds 5]``; every figure is the best round.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rmqkit.broker.pull.handler import PullHandlers
from rmqkit.broker.pull.long_polling import WaitingPull
from rmqkit.broker.send.handler import SendHandlers
from rmqkit.broker.settings import BrokerSettings
from rmqkit.broker.tables.clients import Member
from rmqkit.clock import SYSTEM_CLOCK
from rmqkit.filter import subscription
from rmqkit.filter.sql92 import compile_expression
from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.command import Command, FrameSplitter, decode_command, encode_command, request
from rmqkit.protocol.schemas.clients import ConsumerData, MessageQueue
from rmqkit.protocol.schemas.pull import PullFlag, PullMessageRequest
from rmqkit.protocol.schemas.send import SendMessageV2Request
from rmqkit.standalone import Standalone
from rmqkit.store.message_store import InnerMessage
from rmqkit.store.settings import StoreSettings

PROPERTIES = b"a\x017\x02region\x01hangzhou\x02TAGS\x01TagA\x02UNIQ_KEY\x017F0000010001\x02"
EXPRESSION = "a > 5 AND region = 'hangzhou'"
HELD = 10_000
GROUPS = 1_000


class _Peer:
    """A replacement of a connection."""

    peer = "127.0.0.1:1"
    peer_host = bytes(8)
    active_ms = 0.0

    def send(self, command: Command) -> None:
        """Drop the answer."""

    def send_frame(self, *pieces: bytes) -> None:
        """Store an encoded answer."""
        self.answer = b"".join(pieces)


def _pull(expression: str, *, flags: int, kind: str = "TAG") -> Command:
    """Return a pull as it arrives from the network."""
    header = PullMessageRequest("g", "T", 0, 0, 32, flags, 0, 15_000, 0, expression, kind)
    return _received(request(RequestCode.PULL_MESSAGE, header))


def _received(command: Command) -> Command:
    return decode_command(FrameSplitter().feed(b"".join(bytes(part) for part in encode_command(command)))[0])


def _best_us(work: Callable[[], Any], count: int, rounds: int) -> float:
    best = float("inf")
    for _ in range(rounds):
        start = time.process_time_ns()
        for _ in range(count):
            work()
        best = min(best, (time.process_time_ns() - start) / count / 1000)
    return round(best, 3)


def _message(topic: str, queue_id: int, body: bytes = b"x" * 1024) -> InnerMessage:
    return InnerMessage(
        topic=topic, queue_id=queue_id, body=body, string=PROPERTIES, flag=0, sys_flag=0,
        born_timestamp=0, born_host=bytes(8), store_host=bytes(8), reconsume_times=0,
    )  # fmt: skip


def _send_us(parts: Any, rounds: int) -> dict[str, float]:
    """Measure a send without other clients, and while many wait on other queues or many groups consume its topic."""
    send, peer, long_polling = SendHandlers(parts).send_v2, _Peer(), parts.long_polling
    parts.topics.ensure("S", 1)
    header = SendMessageV2Request("p", "S", "TBW102", 4, 0, 0, 0, 0, PROPERTIES.decode())
    command = _received(request(RequestCode.SEND_MESSAGE_V2, header, b"x" * 1024))
    until_ms = SYSTEM_CLOCK.monotonic_ms() + 3_600_000

    def hold() -> None:
        long_polling.hold("S", 0, WaitingPull(peer, 0, None, until_ms, hold))  # type: ignore[arg-type]

    def hold_others() -> None:
        for number in range(HELD):
            held = WaitingPull(others[number // 10], 0, None, until_ms, lambda: None)  # type: ignore[arg-type]
            long_polling.hold(f"other-{number % 1000}", number // 1000, held)

    def join_groups() -> None:
        for number in range(GROUPS):
            parts.clients.register_consumer(others[number], _member(number), _consumer(f"g{number}", "S"), notify=False)
            parts.offsets.commit(f"g{number}", "S", 0, 1)
            parts.queue_locks.lock(f"g{number}", f"c{number}", [MessageQueue("S", "bench", 0)])

    def leave() -> None:
        for other in others:
            parts.clients.connection_closed(other)
            long_polling.connection_closed(other)

    others: list[Any] = [_Peer() for _ in range(GROUPS)]
    cases = {"alone": (), "10,000 held": (hold_others,), "1,000 groups": (join_groups,)}
    cases["both"] = (hold_others, join_groups)
    costs: dict[str, float] = {}
    hold()
    for _ in range(rounds):
        for name, crowd in cases.items():
            for come in crowd:
                come()
            cost = _best_us(lambda: send(peer, command), 3_000, 1)  # type: ignore[arg-type]
            costs[name] = min(cost, costs.get(name, cost))
            leave()
    return costs


async def measure(root: Path, rounds: int) -> dict[str, Any]:
    """Return all figures."""
    settings = BrokerSettings(
        listen_port=0, bind_address="127.0.0.1", broker_name="bench", property_filter=True, long_polling=True
    )
    standalone = Standalone(root, broker=settings, store=StoreSettings(commit_log_file_bytes=256 << 20))
    await standalone.start()
    try:
        parts: Any = standalone.broker.context
        pull = PullHandlers(parts).pull
        parts.topics.ensure("T", 1)
        for _ in range(1000):
            parts.store.put(_message("T", 0))
        peer: Any = _Peer()
        inline = _pull("TagA || TagB", flags=PullFlag.SUBSCRIPTION)
        parts.clients.register_consumer(peer, _member(0), _consumer("g", "T"), notify=False)
        registered = _pull("", flags=0)
        sql = _pull(EXPRESSION, flags=PullFlag.SUBSCRIPTION, kind="SQL92")
        for command in (inline, registered, sql):
            assert pull(peer, command) is None, "the answer was sent"
            assert peer.answer.count(PROPERTIES) == 32, peer.answer
        expression = compile_expression(EXPRESSION)
        return {
            "pull_32_us": _best_us(lambda: pull(peer, inline), 2_000, rounds),
            "pull_32_registered_us": _best_us(lambda: pull(peer, registered), 2_000, rounds),
            "pull_sql_us": _best_us(lambda: pull(peer, sql), 500, rounds),
            "sql_verdict_us": _best_us(lambda: expression.matches(PROPERTIES), 20_000, rounds),
            "send_us": _send_us(parts, rounds),
        }
    finally:
        await standalone.stop()


def _member(number: int) -> Member:
    return Member(f"c{number}", "PYTHON", 493, SYSTEM_CLOCK.monotonic_ms())


def _consumer(group: str, topic: str) -> ConsumerData:
    return ConsumerData(group_name=group, subscription_data_set=[subscription(topic, "TagA || TagB", version=1)])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        figures = asyncio.run(measure(Path(folder) / "store", rounds))
    print(json.dumps({"machine": platform.machine(), "python": platform.python_version(), **figures}, indent=2))


if __name__ == "__main__":
    main()

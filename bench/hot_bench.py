"""Measures the cost of single requests in a broker's process, over sockets: CPU microseconds, user and kernel, for a
message of 1 KiB, the best of the rounds. Prints JSON.

| Load | What goes over the sockets |
|---|---|
| one at a time | a send, after the answer to the previous one |
| 8 at a time | the same on 8 connections at once |
| pulls of 32 | from one of 4 queues, whose messages alternate in the log |
| pulls of 32, batches | from a queue whose messages came in batches, and are adjacent in the log |
| pops of 1; of 32 | of all queues, with an ack for each message |

The compared processes are loaded in turn, because the load of a shared machine changes: our own with the compiled core
and with plain Python, and other versions of ``rmqkit`` in the folders of ``--tree``.

    python -m bench.hot_bench --rounds 3 --tree /tmp/older
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from bench.broker_bench import sources
from bench.commands.loaded import cpu_seconds, create_topic, find_broker
from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.command import Command, FrameSplitter, decode_command, decode_header, encode_command, request
from rmqkit.protocol.ids import decode_message_offsets, decode_start_offsets
from rmqkit.protocol.record import BatchEntry, encode_batch
from rmqkit.protocol.schemas.pop import AckMessageRequest, PopMessageRequest, PopMessageResponse
from rmqkit.protocol.schemas.pull import PullFlag, PullMessageRequest, PullMessageResponse
from rmqkit.protocol.schemas.send import SendMessageV2Request
from rmqkit.remoting.client import RemotingClient

BODY = os.urandom(1024)
PROPERTIES = "UNIQ_KEY\x01{0:032X}\x02WAIT\x01true\x02TAGS\x01TagA"
QUEUES = 4
_LENGTH = struct.Struct(">I")


def _bytes(command: Command) -> bytes:
    return b"".join(map(bytes, encode_command(command)))


def _send(number: int, topic: str = "T", *, is_batch: bool = False) -> bytes:
    facts = 0 if is_batch else number % QUEUES, 0, 1_700_000_000_000 + number, 0, PROPERTIES.format(number), 0, False
    header = SendMessageV2Request("p", topic, "TBW102", 4, *facts)
    if not is_batch:
        return _bytes(request(RequestCode.SEND_MESSAGE_V2, header, BODY))
    header.batch = True
    members = encode_batch([BatchEntry(BODY, PROPERTIES.format(32 * number + at).encode(), 0) for at in range(32)])
    return _bytes(request(RequestCode.SEND_BATCH_MESSAGE, header, members))


class Peer:
    """A broker's process, and connections to it that use as little CPU as possible."""

    def __init__(self, stack: ExitStack, tree: str, core: str) -> None:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="rmq-bench-"))
        command = [sys.executable, "-m", "rmqkit", "standalone", "--host", "127.0.0.1", "--port", "0"]
        command += ["--namesrv-port", "0", "--store", str(Path(folder) / "store")]
        environment = {**os.environ, "PYTHONPATH": tree, "RMQKIT_NATIVE": core}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=folder)
        stack.callback(process.wait)
        stack.callback(process.send_signal, signal.SIGTERM)
        assert process.stdout is not None, "stdout is piped"
        name_server = dict(word.split("=", 1) for word in process.stdout.readline().split()[1:])["namesrv"]
        self.pid = process.pid
        host, _, port = asyncio.run(self._prepare(name_server)).rpartition(":")
        self.sockets = [stack.enter_context(socket.create_connection((host, int(port)))) for _ in range(8)]
        self.popped = 0
        for number in range(2000):
            self.ask(_send(number))
        for number in range(250):
            self.ask(_send(number, "B", is_batch=True))
        self.ask(_send(0))

    async def _prepare(self, name_server: str) -> str:
        client = RemotingClient()
        try:
            broker = await find_broker(client, name_server)
            connection = await client.connection(broker.broker_addrs[0])
            for topic in "TB":
                await create_topic(connection, topic, QUEUES)
        finally:
            await client.close()
        return str(broker.broker_addrs[0])

    def read(self, at: int, count: int = 1) -> list[Command]:
        """Return the next ``count`` answers of a connection."""
        splitter, answers = FrameSplitter(), list[Command]()
        while len(answers) < count:
            answers += [decode_command(frame) for frame in splitter.feed(self.sockets[at].recv(1 << 18))]  # type: ignore[arg-type]
        return answers

    def skip(self, at: int) -> None:
        """Skip one answer of a connection."""
        left = 4 + _LENGTH.unpack(self.sockets[at].recv(4, socket.MSG_WAITALL))[0] - 4
        self.sockets[at].recv(left, socket.MSG_WAITALL)

    def ask(self, frame: bytes) -> Command:
        self.sockets[0].sendall(frame)
        (answer,) = self.read(0)
        assert answer.code == 0, answer
        return answer


def one_at_a_time(peer: Peer, count: int) -> int:
    frames = [_send(number) for number in range(count)]
    own = peer.sockets[0]
    for frame in frames:
        own.sendall(frame)
        peer.skip(0)
    return count


def eight_at_a_time(peer: Peer, count: int) -> int:
    frames = [_send(number) for number in range(count // 8)]
    places = {own.fileno(): (at, iter(frames)) for at, own in enumerate(peer.sockets)}
    poll = select.poll()
    for own in peer.sockets:
        poll.register(own, select.POLLIN)
        own.sendall(next(places[own.fileno()][1]))
    left = len(peer.sockets)
    while left:
        for number, _ in poll.poll():
            at, following = places[number]
            peer.skip(at)
            frame = next(following, None)
            if frame is None:
                left -= 1
            else:
                peer.sockets[at].sendall(frame)
    return count // 8 * 8


def _pulls(peer: Peer, topic: str, count: int) -> int:
    pulled = offset = 0
    while pulled < count:
        header = PullMessageRequest("g", topic, 0, offset, 32, PullFlag.SUBSCRIPTION, 0, 15_000, 0, "*", "TAG")
        answer = peer.ask(_bytes(request(RequestCode.PULL_MESSAGE, header)))
        told = decode_header(answer, PullMessageResponse)
        pulled += told.next_begin_offset - offset
        offset = told.next_begin_offset if told.next_begin_offset + 32 < told.max_offset else 0
    return pulled


def _pops(peer: Peer, count: int, of: int) -> int:
    done, count = 0, min(count, 2000)  # at least this number of messages exists
    peer.popped += 1
    group = f"pop-{peer.popped}"
    while done < count:
        now_ms = time.time_ns() // 1_000_000
        asked = PopMessageRequest(
            consumer_group=group, topic="T", queue_id=-1, max_msg_nums=of, invisible_time=3_600_000, poll_time=0,
            born_time=now_ms, init_mode=0, exp_type="TAG", exp="*",
        )  # fmt: skip
        told = decode_header(peer.ask(_bytes(request(RequestCode.POP_MESSAGE, asked))), PopMessageResponse)
        starts = decode_start_offsets(told.start_offset_info or "")
        acks = []
        for queue, offsets in decode_message_offsets(told.msg_offset_info or "").items():
            start = (
                f"{starts[queue]} {told.pop_time} {told.invisible_time} {told.revive_qid} 0 broker-a {queue.queue_id}"
            )
            for offset in offsets:
                header = AckMessageRequest(
                    consumer_group=group, topic="T", queue_id=queue.queue_id, offset=offset,
                    extra_info=f"{start} {offset}",
                )  # fmt: skip
                acks.append(_bytes(request(RequestCode.ACK_MESSAGE, header)))
        peer.sockets[0].sendall(b"".join(acks))
        assert all(answer.code == 0 for answer in peer.read(0, len(acks))), "acks succeed"
        done += len(acks)
    return done


LOADS: dict[str, tuple[Callable[[Peer, int], int], float]] = {
    "one at a time": (one_at_a_time, 1),
    "8 at a time": (eight_at_a_time, 2),
    "pulls of 32": (lambda peer, count: _pulls(peer, "T", count), 16),
    "pulls of 32, batches": (lambda peer, count: _pulls(peer, "B", count), 16),
    "pops of 1": (lambda peer, count: _pops(peer, count, 1), 0.3),
    "pops of 32": (lambda peer, count: _pops(peer, count, 32), 1),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--messages", type=int, default=4000)
    parser.add_argument("--tree", action="append", default=[], help="another checkout to compare with")
    parser.add_argument("--load", action="append", choices=list(LOADS), help="only this one")
    parser.add_argument("--no-plain", action="store_true", help="only with the compiled core")
    arguments = parser.parse_args()
    own, *others = [sources(Path(tree)) for tree in (Path(__file__).parents[1], *arguments.tree)]
    trees = {f"{tree}, {kind}": (tree, core) for tree in (own, *others) for kind, core in
             {"compiled core": "1", "plain Python": "0"}.items() if core == "1" or not arguments.no_plain}  # fmt: skip
    with ExitStack() as stack:
        peers = {name.removeprefix(f"{own}, "): Peer(stack, *place) for name, place in trees.items()}
        best: dict[str, dict[str, float]] = {}
        for turn in range(arguments.rounds + 1):
            for name in arguments.load or LOADS:
                load, share = LOADS[name]
                for who, peer in peers.items():
                    before = cpu_seconds(peer.pid)
                    count = load(peer, int(arguments.messages * share))
                    spent_us = (cpu_seconds(peer.pid) - before) / count * 1e6
                    if turn:  # the first round warms up
                        figures = best.setdefault(name, {})
                        figures[who] = round(min(figures.get(who, spent_us), spent_us), 2)
    print(json.dumps({"bench": "hot", "unit": "us of CPU a message", "figures": best}, indent=1))


if __name__ == "__main__":
    main()

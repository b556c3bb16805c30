"""Chat sessions that browsers follow while broker, writer and gateway are killed in turns, ``make kill T=sse``: every
browser must get each event once, in order.

==========  ==========================================================================================================
broker      ``rmq standalone``: name server and broker, over a store that remains
writer      appends numbers to all sessions, see `sse_programs`
gateway     uvicorn with `rmqkit.sse.EventStreamResponse`, see `sse_programs`
browsers    one for each session, in this process: they connect again with ``Last-Event-ID`` after a lost connection
==========  ==========================================================================================================

The three programs are killed with SIGKILL, one after the other, at a random moment, and started again at once on their
ports. The next kill follows when every browser has got an event after the last one. In the end the writer finishes the
sessions. The numbers have no gap and no repetition if nothing is lost and nothing is sent twice.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rmqkit.remoting.tasks import Tasks
from tests.faults.sse_programs import NAMES
from tests.interop.server_process import ServerProcess
from tests.interop.standalone import RMQ
from tests.ports import HOST, free_port
from tests.waiting import until

READY_SECONDS = 150.0
SECONDS_MAX = 200.0
AGAIN_SECONDS = 0.2
ROOT = Path(__file__).parents[2]


class Part:
    """One of the three programs. It is started again with the same command.

    Args:
        ready: the pattern of the line that says that it is ready.
    """

    def __init__(self, name: str, folder: Path, ready: str, *command: str | Path, **environment: str) -> None:
        self.name = name
        self._folder = folder
        self._ready = ready
        self._command = command
        self._environment = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
        self._starts = 0
        self._process: ServerProcess | None = None

    def start(self) -> None:
        """Start the program. Return when it is ready."""
        self._starts += 1
        log = self._folder / f"{self.name}-{self._starts}.log"
        self._process = ServerProcess(self._command, log, self._environment)
        self._process.wait_ready(self._ready, READY_SECONDS)

    def kill(self) -> None:
        """Send SIGKILL."""
        if self._process is not None:
            self._process.kill()

    def stop(self) -> None:
        """Send SIGTERM, and check that the program exits without an error."""
        assert self._process is not None, "the program was started"
        code = self._process.stop(signal.SIGTERM, SECONDS_MAX)
        assert code == 0, f"{self.name} ended with {code}; {self._process.log_tail()}"


@dataclass
class Browser:
    """One session as a browser sees it. ``faults``: numbers that are missing or repeated."""

    name: str
    port: int
    last_id: str = ""
    count: int = 0
    connections: int = 0
    is_finished: bool = False
    faults: list[str] = field(default_factory=list)

    async def follow(self) -> None:
        """Read until the end of the session. Connect again after each lost connection."""
        while not self.is_finished:
            try:
                await self._read()
            except (OSError, EOFError):
                pass
            await asyncio.sleep(AGAIN_SECONDS)

    async def status(self) -> int:
        """Return the status of another connection."""
        _, writer, status = await self._connect()
        writer.close()
        return status

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, int]:
        reader, writer = await asyncio.open_connection(HOST, self.port)
        header = f"Last-Event-ID: {self.last_id}\r\n" if self.last_id else ""
        # A response of HTTP/1.0 has no chunks: its body is what the browser reads.
        writer.write(f"GET /{self.name} HTTP/1.0\r\n{header}\r\n".encode())
        status = int((await reader.readuntil(b"\r\n")).split()[1])
        await reader.readuntil(b"\r\n\r\n")
        return reader, writer, status

    async def _read(self) -> None:
        reader, writer, status = await self._connect()
        self.connections += 1
        try:
            if status != 200:
                self.faults.append(f"{self.name}: status {status} after {self.last_id!r}")
                return
            while not self.is_finished:
                self._dispatch((await reader.readuntil(b"\n\n")).decode())
        finally:
            writer.close()

    def _dispatch(self, frame: str) -> None:
        """Handle a whole frame. A browser ignores a frame whose end is missing."""
        fields = dict(line.split(": ", 1) for line in frame.splitlines() if ": " in line and line[0] != ":")
        if "data" not in fields:
            return
        self.last_id = fields.get("id", self.last_id)
        if "event" in fields:
            self.is_finished = fields["event"] == "end"
            if not self.is_finished:
                self.faults.append(f"{self.name}: {fields}")
            return
        if fields["data"] != str(self.count):
            self.faults.append(f"{self.name}: {fields['data']} in place of {self.count}")
        self.count += 1


@dataclass
class Outcome:
    """The result of a run.

    Attributes:
        kills: the killed programs, in order.
        silent_seconds: for each kill, the time until every browser had got an event that it had not.
        after_end: the statuses of connections after the end of a session.
    """

    kills: list[str]
    silent_seconds: list[float]
    events: int
    connections: int
    after_end: dict[int, int]
    faults: list[str]


class Chat:
    """A run: the programs, the browsers, the kills."""

    def __init__(self, folder: Path, sessions: int, pause_seconds: float, seed: int) -> None:
        names, broker, web = free_port(), free_port(-2, 1), free_port()
        where = ("--host", HOST, "--namesrv-port", str(names), "--port", str(broker), "--store", folder / "store")
        address = f"{HOST}:{names}"
        writer = ("-m", "tests.faults.sse_programs", address, str(sessions), str(pause_seconds))
        service = ("-m", "uvicorn", "--factory", "tests.faults.sse_programs:gateway", "--no-access-log")
        port = ("--host", HOST, "--port", str(web))
        self._parts = [
            Part("broker", folder, r"^ready ", RMQ, "standalone", *where),
            Part("writer", folder, r"^ready", sys.executable, *writer),
            Part("gateway", folder, r"running on", sys.executable, *service, *port, **{NAMES: address}),
        ]
        self._browsers = [Browser(f"session-{number}", web) for number in range(sessions)]
        self._chance = random.Random(seed)
        self._silent: list[float] = []

    async def run(self, kills: int, report: Callable[[str], None] = print) -> Outcome:
        """Start everything, kill, finish the sessions, and return the result."""
        tasks = Tasks()
        killed = [self._parts[i % len(self._parts)].name for i in range(kills)]
        try:
            for part in self._parts:
                await asyncio.to_thread(part.start)
            following = [tasks.own(one.follow(), one.name) for one in self._browsers]
            await self._until_all_got_more("the first event of every session")
            for i in range(kills):
                await self._kill(self._parts[i % len(self._parts)])
                report(f"kill {i + 1}, {killed[i]}: {self._silent[-1]:.1f} s, {self._events} events")
            await asyncio.to_thread(self._parts[1].stop)
            async with asyncio.timeout(SECONDS_MAX):
                await asyncio.gather(*following)
            after_end = [await one.status() for one in self._browsers]
        finally:
            await tasks.close()
            for part in self._parts:
                part.kill()
        return Outcome(
            kills=killed,
            silent_seconds=[round(one, 2) for one in self._silent],
            events=self._events,
            connections=sum(one.connections for one in self._browsers),
            after_end={status: after_end.count(status) for status in set(after_end)},
            faults=[fault for one in self._browsers for fault in one.faults],
        )

    @property
    def _events(self) -> int:
        return sum(one.count for one in self._browsers)

    async def _kill(self, part: Part) -> None:
        """Kill a program in the middle of the events, start it, and wait until every browser gets events again."""
        wanted = self._events + self._chance.randrange(len(self._browsers))
        await until(lambda: self._events >= wanted, "events before a kill", SECONDS_MAX)
        begun = time.monotonic()
        part.kill()
        await asyncio.to_thread(part.start)
        await self._until_all_got_more(f"events of every session after a kill of the {part.name}")
        self._silent.append(time.monotonic() - begun)

    async def _until_all_got_more(self, what: str) -> None:
        before = [one.count for one in self._browsers]
        for one, count in zip(self._browsers, before, strict=True):
            await until(lambda one=one, count=count: one.count > count, what, SECONDS_MAX)  # type: ignore[misc]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="tests.faults.sse", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sessions", type=int, default=1000, help="(1000)")
    parser.add_argument("--kills", type=int, default=10, help="(10)")
    parser.add_argument("--pause", type=float, default=2.0, help="mean seconds between two events of a session (2)")
    parser.add_argument("--seed", type=int, default=4, help="of the moments of the kills (4)")
    given = parser.parse_args()
    print(f"sse: {given.sessions} sessions, {given.kills} kills", flush=True)
    with tempfile.TemporaryDirectory(prefix="rmq-sse-") as folder:
        chat = Chat(Path(folder), given.sessions, given.pause, given.seed)
        outcome = asyncio.run(chat.run(given.kills, lambda line: print(line, flush=True)))
    print(json.dumps(asdict(outcome) | {"faults": outcome.faults[:20]}))
    is_sound = not outcome.faults and outcome.after_end == {204: given.sessions}
    print("sse: every browser got each event once, in order" if is_sound else f"sse: FAILED {len(outcome.faults)}")
    return 0 if is_sound else 1


if __name__ == "__main__":
    sys.exit(main())

"""``rmq broker --shards N``: N brokers ``name-0 … name-N-1``, each in its own process, with one parent.

A broker has one event loop and uses one core. For clients, each shard is a broker: a route spreads the queues of
a topic over shards as over machines. Shards change neither the protocol nor the files.

=========================================================  ====================================================
setting                                                    value of shard ``i``
=========================================================  ====================================================
brokerName (default: host name)                            ``…-i``
listenPort, haListenPort                                   + 10·i: VIP (-2), own and HA port (+1) never clash;
                                                           0 stays 0: a free port at each start
metricsPromExporterPort                                    + i; 0 stays 0
storePathRootDir, storePathCommitLog, readOnlyCommitLog…   ``…/shard-i``
=========================================================  ====================================================

The number of shards of a store can grow (new shards begin empty), but cannot shrink, because messages never move.

The parent has neither a port nor a store. It restarts a shard that ends, after a pause. The pause doubles from 0.1 to
10 s, and is 0.1 s again after a minute of running. The log lines of a shard go into the parent's log, with the shard's
name. If the parent exits for any reason, the standard input of the shards closes, and they stop as after SIGTERM. A
killed shard, like any broker, loses no acknowledged message.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import msgspec
import typer

from rmqkit.cli.servers import logging_setup
from rmqkit.cli.servers.logging_setup import LoggingSettings
from rmqkit.cli.servers.sources import BROKER, Running, Sources, options_of, store_root
from rmqkit.clock import SYSTEM_CLOCK, Clock
from rmqkit.errors import RmqError, SettingsError, StoreMismatch
from rmqkit.remoting.tasks import Tasks, keep_doing
from rmqkit.sentences import plain
from rmqkit.settings import Configuration

_READY = re.compile(rb"ready broker=(\S+)(?: grpc=\S+)?(?: metrics=(\S+))? store=")
_PAUSE_MS_MIN, _PAUSE_MS_MAX = 100.0, 10_000.0
_STEADY_MS = 60_000.0
_LINE_BYTES_MAX = 1 << 20
_ASKED_TO_END = (0, -signal.SIGTERM)
"""Exit codes of a process that was stopped; the second code if the process was still starting."""

_log = logging.getLogger(__name__)


class _Said(msgspec.Struct):
    """A line of a shard's log (`JsonLines`)."""

    message: str
    time: datetime | None = None
    level: str = "ERROR"
    logger: str = "stderr"
    exception: str | None = None


class Shard:
    """One broker process, which is restarted after each exit. Use it only on the event loop.

    Attributes:
        ready: a future with the addresses for clients and for Prometheus (or empty), or with an RmqError if the process
            ended before it was ready.
        exit_code: the exit code of the last process that was stopped on purpose.
    """

    def __init__(self, name: str, command: Sequence[str], clock: Clock = SYSTEM_CLOCK) -> None:
        self._name = name
        self._command = command
        self._clock = clock
        self._process: Process | None = None
        self._is_ready = self._is_stale = False
        self._last_words = ""
        self._pause_ms = _PAUSE_MS_MIN
        self.ready: asyncio.Future[tuple[str, str]] = asyncio.get_running_loop().create_future()
        self.exit_code = 0

    async def live(self) -> float:
        """Run the process once. Return the pause in ms before the next run. A cancellation stops the process first."""
        self._is_ready, self._last_words, born_ms = False, "", self._clock.monotonic_ms()
        process = self._process = await asyncio.create_subprocess_exec(
            *self._command, stdin=PIPE, stdout=PIPE, stderr=PIPE, limit=_LINE_BYTES_MAX, start_new_session=True
        )
        ending = asyncio.ensure_future(self._follow(process))
        try:
            code = await asyncio.shield(ending)
        except asyncio.CancelledError:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            self.exit_code = await ending
            raise
        why = f"{self._name} (process {process.pid}) ended {_manner(code)}{self._last_words}"
        if not self.ready.done():
            self.ready.set_exception(RmqError(why))
            return _PAUSE_MS_MAX
        if self._clock.monotonic_ms() - born_ms > _STEADY_MS:
            self._pause_ms = _PAUSE_MS_MIN
        pause_ms, self._pause_ms = self._pause_ms, min(self._pause_ms * 2, _PAUSE_MS_MAX)
        _log.error("%s; restarting it in %d ms", why, pause_ms)
        return pause_ms

    def reload(self) -> None:
        """Forward SIGHUP, now or when the process is ready."""
        self._is_stale = not self._is_ready
        if self._is_ready and self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGHUP)

    async def _follow(self, process: Process) -> int:
        assert process.stdout is not None, "stdout is piped"
        assert process.stderr is not None, "stderr is piped"
        await asyncio.gather(self._read_ready(process.stdout), self._read_log(process.stderr))
        return await process.wait()

    async def _read_ready(self, stream: asyncio.StreamReader) -> None:
        async for line in _lines(stream):
            if (matched := _READY.match(line)) is None:
                continue
            self._is_ready = True
            if self._is_stale:
                self.reload()
            if self.ready.done():
                _log.warning("%s is ready again at %s", self._name, matched[1].decode())
            else:
                self.ready.set_result((matched[1].decode(), (matched[2] or b"").decode()))

    async def _read_log(self, stream: asyncio.StreamReader) -> None:
        async for line in _lines(stream):
            try:
                said = msgspec.json.decode(line, type=_Said)
            except msgspec.DecodeError:
                text = line.decode(errors="replace").rstrip()
                if text.startswith("rmq: "):  # the reason for the exit, which is logged with the exit code
                    self._last_words = text.removeprefix("rmq")
                    continue
                said = _Said(text)
            logging.getLogger().handle(self._record(said))

    def _record(self, said: _Said) -> logging.LogRecord:
        time = said.time or datetime.fromtimestamp(self._clock.now_ms() / 1000, UTC)
        level = getattr(logging, said.level, logging.ERROR)
        fields = {"name": said.logger, "levelname": said.level, "levelno": level, "msg": said.message}
        fields |= {"created": time.timestamp(), "msecs": time.microsecond // 1000, "exc_text": said.exception}
        return logging.makeLogRecord(fields | {"shard": f"{self._name} "})


class Shards:
    """The shards of one parent.

    Attributes:
        addresses: the addresses for clients; set by `start`.
        metrics_addresses: the addresses for Prometheus, or empty texts.
    """

    def __init__(self, commands: Mapping[str, Sequence[str]], root: Path) -> None:
        self._commands = commands
        self._shards: list[Shard] = []
        self.root = root
        self.addresses: list[str] = []
        self.metrics_addresses: list[str] = []

    @classmethod
    def of(cls, count: int, *, config: Path | None, print_config: bool, as_json: bool, **options: Any) -> Self:
        """Return the shards of a command line, and set up the log. With ``print_config``, only print the settings.
        Raises SettingsError, StoreMismatch: the settings or the store do not allow these shards."""
        chosen = options_of(**options)
        sources = Sources(BROKER, config, chosen)
        everything = Configuration.load(BROKER, sources.read()[0])
        texts = everything.texts()
        shards = [shard_settings(texts, index) for index in range(count)]
        check_settings([{**texts, **own} for own in shards])
        if print_config:
            print_shards(Running(sources, [everything], [{}]), shards, as_json=as_json)
            raise typer.Exit
        root = store_root(everything.settings[1])
        check_layout(root, count)
        logging_setup.set_up(next(one for one in everything.settings if isinstance(one, LoggingSettings)))
        start = [sys.executable, "-P", "-m", "rmqkit", "broker", "--ends-with-stdin"]
        start += ["-c", str(config)] if config else []
        # Pass grpcServerPort, or the first shard would open the default gRPC port, and serve only its own queues there.
        every = {**chosen, "logFile": "", "logFormat": "json", "grpcServerPort": texts["grpcServerPort"]}
        commands = {own["brokerName"]: [*start, *_sets({**every, **own})] for own in shards}
        return cls(commands, root)

    async def start(self) -> None:
        """Start all shards and wait until all are ready. Raises RmqError: a shard ended; all are stopped."""
        self._tasks = Tasks()
        self._shards = [Shard(name, command) for name, command in self._commands.items()]
        for name, shard in zip(self._commands, self._shards, strict=True):
            self._tasks.start(keep_doing(shard.live, wake=asyncio.Event(), name=name), name)
        try:
            started = await asyncio.gather(*(shard.ready for shard in self._shards))
        except BaseException:
            await self._tasks.close()
            raise
        self.addresses, self.metrics_addresses = (list(part) for part in zip(*started, strict=True))

    async def stop(self) -> None:
        """Stop all shards. Raises RmqError: a shard did not stop cleanly."""
        await self._tasks.close()
        ends = {name: shard.exit_code for name, shard in zip(self._commands, self._shards, strict=True)}
        if bad := [f"{name} ended {_manner(code)}" for name, code in ends.items() if code not in _ASKED_TO_END]:
            raise RmqError(f"{', '.join(bad)} instead of stopping cleanly; its store is recovered at the next start")

    def reload(self) -> None:
        """Reopen the log, and pass SIGHUP to all shards."""
        logging_setup.reopen()
        for shard in self._shards:
            shard.reload()


def _sets(texts: Mapping[str, str]) -> Iterator[str]:
    for key, text in texts.items():
        yield from ("--set", f"{key}={text}")


def _manner(code: int) -> str:
    return f"with exit code {code}" if code >= 0 else f"by {signal.Signals(-code).name}"


async def _lines(stream: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while True:
        try:
            line = await stream.readline()
        except ValueError:
            line = b"a line of more than %d bytes was left out" % _LINE_BYTES_MAX
        if not line:
            return
        yield line


_STEPS = {"listenPort": 10, "haListenPort": 10, "metricsPromExporterPort": 1, "grpcServerPort": 1}
_FOLDERS = ("storePathRootDir", "storePathCommitLog", "readOnlyCommitLogStorePaths")
_UNSHARDED = {"commitlog", "config", "consumequeue"}
_FOLDER = re.compile(r"shard-(0|[1-9]\d*)")
_PORT_MAX = 65535
_VIP_BELOW = 2


def shard_settings(texts: Mapping[str, str], index: int) -> dict[str, str]:
    """Return the settings of one shard that differ from the settings that all shards share."""
    ports = {key: str(int(texts[key]) + step * index) for key, step in _STEPS.items() if int(texts[key]) > 0}
    folders = {
        key: ",".join(str(Path(folder.strip()) / f"shard-{index}") for folder in texts[key].split(","))
        for key in _FOLDERS
        if texts[key]
    }
    return {"brokerName": f"{texts['brokerName'] or socket.gethostname()}-{index}", **ports, **folders}


def check_settings(shards: Sequence[Mapping[str, str]]) -> None:
    """Refuse shards that would share a port or a master, or would need a port above 65535.
    Raises SettingsError."""
    if address := shards[0]["haMasterAddress"]:
        raise SettingsError(f"haMasterAddress={address} is of one master: leave it out, name servers know each shard's")
    users: dict[int, str] = {}
    for texts in shards:
        for what, port in _ports(texts):
            user = f"{what} of {texts['brokerName']}"
            if port > _PORT_MAX:
                raise SettingsError(f"{user} would be {port}, above {_PORT_MAX}: choose a lower one, or fewer shards")
            if port in users:
                raise SettingsError(f"{user} would be {port}, as is {users[port]}: choose another one of the two")
            users[port] = user


def _ports(texts: Mapping[str, str]) -> Iterator[tuple[str, int]]:
    own, ha, metrics, grpc = (int(texts[key]) for key in _STEPS)
    if own:
        yield "listenPort", own
    if own > _VIP_BELOW:
        yield "the VIP port", own - _VIP_BELOW
    if own or ha:
        yield "haListenPort", ha or own + 1
    if metrics and texts["metricsExporterType"] != "DISABLE":
        yield "metricsPromExporterPort", metrics
    if grpc > 0:
        yield "grpcServerPort", grpc


def check_layout(root: Path, count: int | None) -> None:
    """Refuse a store directory if some of its messages would not be served; ``count`` is None for an unsharded broker.
    Raises StoreMismatch."""
    filled = {folder.name for folder in root.glob("*") if any(folder.glob("*"))}
    needed = max((int(name.removeprefix("shard-")) + 1 for name in filled if _FOLDER.fullmatch(name)), default=0)
    remedy = ""
    if count is None and needed:
        remedy = f"holds shards: start it with --shards {needed}"
    elif count is not None and filled & _UNSHARDED:
        remedy = f"is an unsharded broker's, it has {min(filled & _UNSHARDED)}: start it without --shards"
    elif count is not None and needed > count:
        remedy = f"holds shard-{needed - 1}, which --shards {count} would leave unserved: use --shards {needed}"
    if remedy:
        raise StoreMismatch(f"store {root} {remedy}, or choose another directory")


def print_shards(running: Running, shards: Sequence[Mapping[str, str]], *, as_json: bool) -> None:
    """Print the common settings in the form of a file, and the different settings of each shard."""
    if as_json:
        rows = [msgspec.to_builtins(row, enc_hook=plain) for row in running.configurations[0].described()]
        rows = [row | {"shards": [own[row["key"]] for own in shards if row["key"] in own]} for row in rows]
        print(msgspec.json.format(msgspec.json.encode(rows)).decode())
        return
    for index, own in enumerate(shards):
        print(f"# shard-{index}: " + "  ".join(f"{key}={text}" for key, text in own.items()))
    running.print(as_json=False)

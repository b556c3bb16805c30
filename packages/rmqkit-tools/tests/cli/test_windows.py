"""Features that work on Windows, tested in an interpreter without the names that Windows lacks."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rmqkit.standalone import Standalone
from rmqkit.store.settings import StoreSettings

WINDOWS = r"""
import asyncio, asyncio.unix_events, getpass, os, signal, socket, subprocess, sys
import rich.console, rich.live, rich.progress, rich.table, typer, typer.rich_utils  # they have a side for Windows
for module in ("fcntl", "resource", "termios", "tty", "pty", "pwd", "grp", "syslog", "uvloop", "readline"):
    sys.modules[module] = None
for name in (
    "fdatasync posix_fallocate posix_fadvise pread pwrite preadv pwritev statvfs fstatvfs fork forkpty "
    "register_at_fork getuid geteuid getgid getppid O_CLOEXEC O_DIRECTORY O_NOFOLLOW SEEK_DATA SEEK_HOLE killpg "
    "sched_getaffinity sched_yield pipe2 getloadavg uname setsid mkfifo chown WNOHANG sendfile"
).split():
    vars(os).pop(name, None)
for name in [*vars(signal)]:
    if name.startswith("SIG") and name not in "SIGINT SIGTERM SIGABRT SIGFPE SIGILL SIGSEGV SIG_DFL SIG_IGN".split():
        delattr(signal, name)
for name in ("pthread_sigmask", "sigwait", "alarm", "setitimer", "siginterrupt", "pthread_kill"):
    vars(signal).pop(name, None)
vars(socket).pop("SO_REUSEPORT")

def not_there(self, *arguments):
    raise NotImplementedError

asyncio.unix_events._UnixSelectorEventLoop.add_signal_handler = not_there
asyncio.unix_events._UnixSelectorEventLoop.remove_signal_handler = not_there
sys.platform = "win32"
"""

RMQ = "\nsys.argv[0] = 'rmq'\nfrom rmqkit.__main__ import main\nmain()\n"


async def start(program: str, *arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", WINDOWS + program, *arguments),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "COLUMNS": "200"},
    )


async def run(program: str, *arguments: str) -> tuple[int, str, str]:
    process = await start(program, *arguments)
    out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


CLIENT = """
import asyncio
from rmqkit import Message, Producer, PullConsumer, PushConsumer, sync
name_server = sys.argv[1]

async def main():
    async with Producer("p", name_server) as producer:
        print((await producer.send(Message(topic="T", body=b"async"))).status.name)
    got, consumer = asyncio.Event(), PushConsumer("g", name_server)

    @consumer.on("T")
    async def handle(message):
        got.set()

    async with consumer:
        await got.wait()
    print("consumed")

asyncio.run(main())
with sync.Producer("p", name_server) as producer:
    print(producer.send(Message(topic="T", body=b"sync")).status.name)
"""


def test_clients_send_tail_and_admin_work(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Standalone(tmp_path, store=StoreSettings(commit_log_file_bytes=1 << 20)) as both:
            at = ("-n", both.namesrv_address)
            assert await run(CLIENT, both.namesrv_address) == (0, "SEND_OK\nconsumed\nSEND_OK\n", "")
            sent, listed, shown, explained, settings = await asyncio.gather(
                run(RMQ, "send", "T", "hello", "again", *at),
                run(RMQ, "cluster", "list", *at),
                run(RMQ, "tail", "T", "--from", "beginning", "--count", "2", "--format", "{body}", *at),
                run(RMQ, "--help"),
                run(RMQ, "namesrv", "settings", *at),
            )
            assert (sent[0], sent[1].count("sent 2 to T")) == (0, 1), sent
            assert listed[0] == 0 and both.broker_address in listed[1], listed
            assert settings[0] == 0 and "listenPort" in settings[1], settings
            bodies = shown[1].split()
            assert (shown[0], len(bodies), {*bodies} <= {"async", "sync", "hello", "again"}) == (0, 2, True), shown
            endless = await start(RMQ, "tail", "T", "--from", "beginning", "--format", "{body}", *at)
            assert endless.stdout is not None
            assert await endless.stdout.readline()
            endless.send_signal(signal.SIGINT)
            _, err = await endless.communicate()
            assert (endless.returncode, err) == (0, b"")
            assert explained[0] == 0 and "tail" in explained[1] and "standalone" not in explained[1]

    asyncio.run(scenario())


def test_sizes_are_shown_in_tables() -> None:
    program = "\nfrom rmqkit.cli.frame.printing import cell\nprint(cell('bodyBytes', 1536), cell('storeSize', 200))"
    assert asyncio.run(run(program)) == (0, "1.5 KiB 200 B\n", "")


def test_the_fixtures_say_in_one_line_what_they_need(tmp_path: Path) -> None:
    """pytest needs more of Windows than the names that were taken away, so the plugin alone believes to be there."""
    believes = (
        "import types, rmqkit.testing.plugin\nrmqkit.testing.plugin.sys = types.SimpleNamespace(platform='win32')\n"
    )
    (tmp_path / "conftest.py").write_text(believes)
    (tmp_path / "test_it.py").write_text("def test_it(rmq_broker): ...\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env={**os.environ, "COLUMNS": "200"})
    needed = "rmq_broker needs Linux or macOS, and this is Windows: run the tests in WSL or in a container"
    assert done.returncode == 1
    assert done.stdout.count(f"Failed: {needed}") == 1, done.stdout


@pytest.mark.parametrize("command", ["broker", "store"])
def test_servers_say_in_one_line_what_they_need(command: str) -> None:
    code, out, err = asyncio.run(run(RMQ, command))
    assert (code, out) == (2, "")
    assert err.startswith(f"rmq: rmq {command} needs Linux or macOS, and this is Windows: ")
    assert err.count("\n") == 1

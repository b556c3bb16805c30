"""The servers of containers, run as local processes: the same arguments, variables and files, with the test's ports and
folders.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.interop.server_process import ServerProcess

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
BIN = Path(sys.executable).parent
SECONDS_MAX = 150
DATA, CONFIG = "/var/lib/rmqkit", "/etc/rmqkit"


def documents(path: Path) -> list[Any]:
    """Return the documents of a YAML file. libyaml takes a tenth of the time, in every test process."""
    return list(yaml.load_all(path.read_text(), yaml.CSafeLoader))


class Pod:
    """A running server. ``address``: its port. ``metrics``: the address of its metrics, empty if it has none."""

    def __init__(self, process: ServerProcess, ready: str) -> None:
        self.process = process
        self.address = re.search(r"(?:namesrv|broker)=(\S+)", ready)[1]
        found = re.search(r" metrics=(\S+)", ready)
        self.metrics = found[1] if found else ""


@contextmanager
def pods(folder: Path) -> Iterator[object]:
    """Yield a function that starts a server from a container's arguments. All servers are stopped cleanly at the
    end.
    """
    started: list[ServerProcess] = []
    with ExitStack() as stack:

        def start(role, arguments, variables, files, environ=None, **settings):
            data = folder / role
            for name, text in files.items():
                data.mkdir(exist_ok=True)
                (data / name).write_text(text)
            paths = {DATA: str(data / "data"), CONFIG: str(data)}
            words = [resolved(word, variables, paths) for word in arguments]
            settings = {"listenPort": "0", "bindAddress": "127.0.0.1", **settings}
            words += [part for pair in settings.items() for part in ("--set", "=".join(pair))]
            env = {name: text for name, text in os.environ.items() if name != "NAMESRV_ADDR"}
            env |= {"HOME": str(data), **(environ or {})}
            process = stack.enter_context(ServerProcess([BIN / "rmq", *words], folder / f"{role}.log", env))
            ready = process.wait_ready(r"^ready .*$", SECONDS_MAX)
            started.append(process)
            return Pod(process, ready[0])

        yield start
        for process in reversed(started):
            assert process.stop(signal.SIGTERM, SECONDS_MAX) == 0, process.log_tail()


def resolved(word: str, variables: dict[str, str], paths: dict[str, str]) -> str:
    word = re.sub(r"\$\((\w+)\)", lambda match: variables[match[1]], word)
    for place, here in paths.items():
        word = word.replace(place, here)
    return word


def rmq(*words: object) -> str:
    done = subprocess.run([BIN / "rmq", *map(str, words)], capture_output=True, text=True, timeout=SECONDS_MAX)
    assert done.returncode == 0, done.stderr
    return done.stdout


def probe(command: list[str], address: str) -> list[str]:
    """Run a probe's command with the port that was chosen here. Return the command."""
    assert command[0] == "rmq"
    words = [re.sub(r"^127\.0\.0\.1:\d+$", address, word) for word in command[1:]]
    assert address in words
    rmq(*words)
    return words

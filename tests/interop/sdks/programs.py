"""Apache's SDKs for gRPC, unmodified, each in a program that runs the same scenarios and reports the results.

    PROGRAM HOST:PORT PREFIX SCENARIO...

Topics and groups are called ``PREFIX-name``; the test creates them. Scenarios run at the same time. Each prints a line
of JSON at its end, ``["plain", {…}]``; a failed one prints ``{"error": …}``. ``load`` runs until the standard input is
closed, and prints ``["push", body]`` or ``["simple", body]`` for each received message.

Each SDK is fetched and built once, into the cache that `kit` describes:

| SDK | Where its version is named | Needs |
|---|---|---|
| Java | ``java/pom.xml`` | JDK, Maven; openssl |
| Go | ``go/go.mod``, ``go/go.sum`` | go |
| Node | ``node/package-lock.json`` | node, npm |
| Python | ``requirements/sdk.txt`` | pip; an environment of its own |

A missing part raises `Unavailable` with the reason.
"""

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import msgspec

from tests.interop.go_and_node import (
    BUILD_SECONDS,
    GO_BUILD,
    GO_ENV,
    Program,
    cached,
    complete,
    fetch,
    find_tool,
    node_modules,
)
from tests.interop.kit import LOGGING_OFF, Unavailable, fetch_jars, find_java, move_into_place

HERE = Path(__file__).parent
JAVA_HEAP_MB = 256
LOAD = ("push", "simple")
"""The consumers of ``load``."""


def prepare_java() -> Program:
    """Return the SDK of `java/pom.xml`, a single jar with all dependencies. Raises Unavailable."""
    folder = HERE / "java"
    java, pom = find_java(), folder / "pom.xml"
    find_tool("openssl")  # servers create a certificate with it: by default this SDK uses TLS
    lib = cached("java-sdk", [pom])
    if not lib.is_dir():
        fetch_jars("Java SDK", lib, pom)
    program = cached("java-sdk-program", [pom, folder / "Sdk.java"])
    if not program.is_dir():
        javac = java.resolve().with_name("javac")
        if not javac.exists():
            raise Unavailable(f"{java} is a runtime without javac")
        with tempfile.TemporaryDirectory(dir=program.parent, prefix="compiling-") as compiled:
            command = [str(javac), "-nowarn", "-encoding", "UTF-8", "-d", f"{compiled}/classes", "-cp", f"{lib}/*"]
            done = complete([*command, "Sdk.java"], folder, {}, BUILD_SECONDS)
            assert done.returncode == 0, f"javac failed on {folder}:\n{done.stderr}"
            Path(compiled, "classes", "logging-off.xml").write_text(LOGGING_OFF)
            move_into_place(Path(compiled, "classes"), program)
    options = [f"-Xmx{JAVA_HEAP_MB}m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]
    options += [f"-Drmq.logback.configurationFile={program}/logging-off.xml"]
    return Program([java, *options, "-cp", f"{program}:{lib}/*", "Sdk"], {})


def prepare_go() -> Program:
    """Return the SDK of `go/go.mod`. Raises Unavailable."""
    folder = HERE / "go"
    program = cached("go-sdk", sorted([*folder.glob("*.go"), *folder.glob("go.*")]))
    if not program.exists():
        go = find_tool("go")
        fetch([go, "list", "-deps", "."], folder, GO_ENV)
        with tempfile.TemporaryDirectory(dir=program.parent, prefix="building-") as built:
            done = complete([go, *GO_BUILD, "-o", f"{built}/program", "."], folder, GO_ENV, BUILD_SECONDS)
            assert done.returncode == 0, f"go build failed in {folder}:\n{done.stderr}"
            move_into_place(Path(built, "program"), program)
    return Program([program], {}, {"rocketmq.client.enableSsl": "false", "rocketmq.client.logLevel": "error"})


def prepare_node() -> Program:
    """Return the SDK of `node/package-lock.json`. Raises Unavailable."""
    folder = HERE / "node"
    return Program([find_tool("node"), folder / "client.js"], {}, {"NODE_PATH": str(node_modules(folder))})


def prepare_python() -> Program:
    """Return the SDK of `requirements/sdk.txt`. Raises Unavailable."""
    pins = HERE.parents[2] / "requirements" / "sdk.txt"
    packages = cached("python-sdk", [pins])
    if not packages.is_dir():
        with tempfile.TemporaryDirectory(dir=packages.parent, prefix="fetching-") as fetched:
            options = ["--quiet", "--disable-pip-version-check", "--retries=1", "--require-hashes"]
            command = [sys.executable, "-m", "pip", "install", *options, f"--target={fetched}/packages"]
            fetch([*command, f"--requirement={pins}"], fetched, {})
            move_into_place(Path(fetched, "packages"), packages)
    return Program([sys.executable, "-S", HERE / "python" / "client.py"], {}, {"PYTHONPATH": str(packages)})


SDKS: Mapping[str, Callable[[], Program]] = {
    "java": prepare_java,
    "go": prepare_go,
    "node": prepare_node,
    "python": prepare_python,
}


class Running:
    """A running program, killed at the end of the ``with`` block."""

    def __init__(self, program: Program, home: Path, endpoint: str, prefix: str, *scenarios: str) -> None:
        home.mkdir()
        self._errors = home / "stderr"
        self._told: dict[str, Any] = {}
        self._came: list[tuple[str, int, float]] = []
        self.scenarios = scenarios
        with self._errors.open("wb") as errors:
            self._popen = subprocess.Popen(
                [*map(str, program.command), endpoint, prefix, *scenarios],
                env={**os.environ, **program.env, "HOME": str(home)},
                cwd=home,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._popen.stdout is not None, "stdout is a pipe"
        for line in self._popen.stdout:
            if line.startswith(b'["'):  # not a log line of an SDK
                name, facts = msgspec.json.decode(line)
                self._told[name] = facts
                if name in LOAD:
                    self._came.append((name, int(facts), time.monotonic()))

    def has_told(self, *names: str) -> bool:
        """Return True if the program has reported all these scenarios, or has closed its output."""
        return self._told.keys() >= set(names) or not self._reader.is_alive()

    def facts(self, name: str) -> Any:
        """Return the last report of a scenario. Raises AssertionError: there is none."""
        if name not in self._told:
            raise AssertionError(f"nothing told of {name}: {self._errors.read_text(errors='replace')[-2000:]}")
        return self._told[name]

    def first_since(self, sent_ms: float) -> dict[str, float]:
        """Return the time at which each consumer of ``load`` first received a message sent since ``sent_ms``, by
        `time.monotonic`.
        """
        came = [(way, at) for way, body, at in list(self._came) if body >= sent_ms]
        return dict(reversed(came))

    def end_load(self) -> None:
        """Close the program's standard input."""
        assert self._popen.stdin is not None, "stdin is a pipe"
        self._popen.stdin.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._popen.kill()
        self._popen.wait()
        self._reader.join()
        for pipe in (self._popen.stdin, self._popen.stdout):
            if pipe is not None:
                pipe.close()

"""The time that a user with only the wheels needs for the first message, and for the first test with the pytest plugin.

``python -m tests.release.first_use --python python3.12 --wheel dist/rmqkit-….whl`` makes two empty environments with
venv and pip, as a user does. The wheels of the other packages are in the same folder (``--find-links``):

1. ``pip install 'WHEEL[server]'``, ``rmq standalone``, and README's client in a second process: the first message.
2. ``pip install WHEEL``, with only the dependencies of a client: its size, and README's two clients against the same
   broker. Then ``pip install 'WHEEL[testing]'`` and the tutorial's first test.

Time is measured from the creation of each environment. Packages come from the index that this machine's pip uses.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.docs.blocks import blocks_of
from tests.interop.server_process import ServerProcess

ROOT = Path(__file__).parents[2]
FIRST_MESSAGE_SECONDS_MAX = 120.0
FIRST_TEST_SECONDS_MAX = 300.0
CLIENT_MB_MAX = 25.0
_SECONDS_MAX = 600.0
_ADDRESS = "127.0.0.1:9876"


class Unusable(Exception):
    """Raised when a built package does not work as it should."""


@dataclass(slots=True)
class FirstUse:
    """Seconds and sizes. The size of ``site-packages`` is without pip and its dependencies, after pip compiled the
    files.
    """

    python: str
    client_mb: float
    client_install: float
    server_mb: float
    server_install: float
    first_message: float
    first_test: float

    def faults(self) -> list[str]:
        """Return the limits that were exceeded."""
        limits = [
            ("a client's site-packages, MB", self.client_mb, CLIENT_MB_MAX),
            ("first message, s", self.first_message, FIRST_MESSAGE_SECONDS_MAX),
            ("first test, s", self.first_test, FIRST_TEST_SECONDS_MAX),
        ]
        return [
            f"Python {self.python}: {what}: {found:.1f}, at most {most:g}"
            for what, found, most in limits
            if found > most
        ]

    def __str__(self) -> str:
        return (
            f"{self.python:8} client {self.client_mb:5.1f} MB in {self.client_install:5.1f} s, "
            f"server {self.server_mb:5.1f} MB in {self.server_install:5.1f} s, "
            f"first message {self.first_message:5.1f} s, first test {self.first_test:5.1f} s"
        )


def first_use(python: Path, wheel: Path, folder: Path, more: tuple[Path, ...] = ()) -> FirstUse:
    """Install the wheel twice and use it.

    ``more``: additional wheels for the server's environment.
    Raises Unusable: something failed. The text is the printed output."""
    began = time.monotonic()
    server = Environment.made(python, folder / "server", wheel.parent)
    server.install(f"{wheel}[server]", *more)
    server_install = time.monotonic() - began
    command = [server.bin / "rmq", "standalone", "--store", folder / "store", "--namesrv-port", "0", "--port", "0"]
    with ServerProcess([*map(str, command)], folder / "standalone.log", _clean()) as process:
        address = process.wait_ready(r"^ready namesrv=(\S+)", _SECONDS_MAX)[1]
        asyncio_client, sync_client = readme_clients(address)
        there = {"NAMESRV_ADDR": address}
        _expect(server.run("-c", asyncio_client), r"SEND_OK \w+\npaid \['order-17'\] b'17'\n")
        first_message = time.monotonic() - began
        if more and "read by the compiled core" not in (
            told := server.rmq("doctor", "--store", folder / "none", may_fail=True)
        ):
            raise Unusable(f"the native core is not used:\n{told}")

        began = time.monotonic()
        client = Environment.made(python, folder / "client", wheel.parent)
        client.install(str(wheel))
        client_install, client_mb = time.monotonic() - began, client.mb()
        _expect(client.run("-c", asyncio_client), r"SEND_OK \w+\npaid \['order-17'\] b'1[78]'\n")
        _expect(client.run("-c", sync_client, **there), "")
        _expect(client.run("-c", COMPRESSED), "zlib lz4 zstd\n")
        client.install(f"{wheel}[testing]")
        for block in blocks_of(ROOT / "docs/tutorial/testing.md")[:2]:
            (folder / block.title).write_text(block.text)
        _expect(client.run("-m", "pytest", "-q", "test_billing.py", cwd=folder), r"(?s).*\b1 passed in .*")
        first_test = time.monotonic() - began
        if process.stop(signal.SIGTERM, _SECONDS_MAX) != 0:
            raise Unusable(process.log_tail())
    return FirstUse(server.version, client_mb, client_install, server.mb(), server_install, first_message, first_test)


COMPRESSED = """
from rmqkit.protocol.compression import Compression, compress, decompress
body = b"order 17 " * 500
for kind in Compression:
    assert decompress(compress(body, kind), 1 | kind) == body
print("zlib lz4 zstd")
"""


def readme_clients(address: str) -> tuple[str, str]:
    """Return README's two client programs: one for a name server at ``address``, one that reads ``NAMESRV_ADDR``."""
    programs = [block.text for block in blocks_of(ROOT / "README.md") if block.language == "python"]
    clients = [text for text in programs if "rmqkit.connect(" in text or "sync.Producer(" in text]
    if len(clients) != 2 or _ADDRESS not in clients[0]:
        raise Unusable(f"README has {len(clients)} clients: 2 are expected, the first one for {_ADDRESS}")
    return clients[0].replace(_ADDRESS, address), clients[1]


@dataclass(slots=True)
class Environment:
    """A virtual environment into which pip installs the wheels of a folder and their dependencies."""

    home: Path
    wheels: Path
    version: str

    @classmethod
    def made(cls, python: Path, home: Path, wheels: Path) -> Environment:
        """Create an empty environment."""
        _run([python, "-m", "venv", home], home.parent)
        made = cls(home, wheels, "")
        made.version = made.run("-c", "import platform; print(platform.python_version())").strip()
        return made

    @property
    def bin(self) -> Path:
        return self.home / "bin"

    def install(self, *what: str | Path) -> None:
        """Install packages with pip."""
        quiet = ("--quiet", "--disable-pip-version-check", "--find-links", self.wheels)
        self.run("-m", "pip", "install", *quiet, *what)

    def run(self, *words: str | Path, cwd: Path | None = None, may_fail: bool = False, **environ: str) -> str:
        """Run the environment's Python, with additional environment variables. Return its output."""
        return _run([self.bin / "python", *words], cwd or self.home.parent, may_fail=may_fail, **environ)

    def rmq(self, *words: str | Path, may_fail: bool = False) -> str:
        """Run the environment's ``rmq`` command. Return its output."""
        return _run([self.bin / "rmq", *words], self.home.parent, may_fail=may_fail)

    def mb(self) -> float:
        """Return the size of its site-packages in MB, without pip and setuptools."""
        (packages,) = self.home.glob("lib/python*/site-packages")
        own = [
            one
            for one in packages.iterdir()
            if not re.match(r"(pip|setuptools|pkg_resources|_distutils_hack)\b", one.name)
        ]
        files = [file for one in own for file in (one.rglob("*") if one.is_dir() else [one]) if file.is_file()]
        return sum(file.stat().st_size for file in files) / 1e6


def _clean() -> dict[str, str]:
    return {name: text for name, text in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV", "RMQ"))}


def _run(command: list[str | Path], cwd: Path, *, may_fail: bool = False, **environ: str) -> str:
    done = subprocess.run(
        [*map(str, command)], capture_output=True, text=True, cwd=cwd, env=_clean() | environ, timeout=_SECONDS_MAX
    )
    if done.returncode != 0 and not may_fail:
        raise Unusable(f"{' '.join(map(str, command))[:200]} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr if may_fail else done.stdout


def _expect(printed: str, pattern: str) -> None:
    if not re.fullmatch(pattern, printed):
        raise Unusable(f"expected {pattern!r}, printed:\n{printed}")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Time a person who has only the wheel.")
    parser.add_argument("--python", type=Path, default=Path(sys.executable), help="the interpreter of the environments")
    parser.add_argument("--wheel", type=Path, required=True)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = first_use(given.python, given.wheel.resolve(), Path(folder))
    print(found)
    sys.exit("\n".join(found.faults()) or 0)


if __name__ == "__main__":
    main()

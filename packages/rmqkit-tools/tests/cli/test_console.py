"""``rmq console``, ``rmq standalone --console`` as processes: where they listen, when they are ready, how they end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rmqkit.console.access.logins import FileUsers, Role, User
from tests.cli.in_process import rmq

COMMAND = [sys.executable, "-m", "rmqkit"]
SECONDS = 120


@contextmanager
def started(folder: Path, *arguments: str, stderr: int | None = None) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "XDG_STATE_HOME": str(folder / "state"), "RMQCONF_grpcServerPort": "-1"}
    with subprocess.Popen(
        [*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def ready(process: subprocess.Popen[str]) -> dict[str, str]:
    """The words of a ready line."""
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("ready "), line
    return dict(word.split("=", 1) for word in line.split()[1:])


def page(address: str, path: str) -> dict[str, object]:
    with urllib.request.urlopen(f"{address.rstrip('/')}{path}?format=json", timeout=SECONDS) as answer:
        found: dict[str, object] = json.load(answer)
        return found


def test_standalone_with_a_console(tmp_path: Path) -> None:
    ports = ("--namesrv-port", "0", "--port", "0", "--console", "--console-port", "0")
    with started(tmp_path, "standalone", "--store", str(tmp_path / "store"), *ports) as process:
        broker = ready(process)["broker"]
        address = ready(process)["console"]
        assert address.startswith("http://127.0.0.1:")
        assert [row["addr"] for row in page(address, "/local/brokers")["brokers"]] == [broker]  # type: ignore[attr-defined]
        process.send_signal(signal.SIGTERM)
        assert process.wait(SECONDS) == 0
        assert process.stdout is not None
        assert process.stdout.read() == ""  # the console has the same output: it has ended, too


def test_a_console_of_a_killed_broker_ends(tmp_path: Path) -> None:
    ports = ("--namesrv-port", "0", "--port", "0", "--console", "--console-port", "0")
    with started(tmp_path, "standalone", "--store", str(tmp_path / "store"), *ports) as process:
        ready(process)
        ready(process)
        process.kill()
        process.wait(SECONDS)
        assert process.stdout is not None
        assert process.stdout.read() == ""  # returns when the console has closed its end


def test_a_console_alone_reports_its_address_and_ends_cleanly(tmp_path: Path) -> None:
    with started(tmp_path, "console", "-n", "127.0.0.1:1", "--port", "0", "--read-only") as process:
        address = ready(process)["console"]
        with pytest.raises(urllib.error.HTTPError, match="503"):
            page(address, "/about")
        process.send_signal(signal.SIGTERM)
        assert process.wait(SECONDS) == 0
    assert (tmp_path / "state" / "rmqkit" / "console-audit.jsonl").exists()


def test_a_console_that_somebody_looks_at_ends_without_a_word(tmp_path: Path) -> None:
    arguments = ("console", "-n", "127.0.0.1:1", "--port", "0")
    with started(tmp_path, *arguments, stderr=subprocess.PIPE) as process:
        address = ready(process)["console"].rstrip("/")
        paths = ("%2Flocal%2Ftopics", "%2Flocal%2F")
        with contextlib.ExitStack() as stack:
            for path in paths:
                stream = stack.enter_context(urllib.request.urlopen(f"{address}/events?path={path}", timeout=SECONDS))
                while b"event: live" not in stream.readline():
                    pass
            process.send_signal(signal.SIGTERM)
            assert process.wait(SECONDS) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--host", "0.0.0.0"], "does not listen on 0.0.0.0 without users"),
        (["--host", "0.0.0.0", "--login"], "without TLS"),
        (["--host", "0.0.0.0", "--cert", "c.pem", "--key", "k.pem"], "without users"),
        (["--cert", "c.pem"], "belong together"),
        (["--env", "prod"], "must be NAME=HOST:PORT"),
        (["--env", "login=127.0.0.1:9876"], "cannot be part of an address"),
        (["-n", "nonsense"], "name servers"),
        (["--users", "nowhere"], "users file nowhere"),
    ],
)
def test_what_cannot_be_served_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    found = rmq("console", *arguments)
    assert found.returncode == 2, found.stderr
    assert words in found.stderr


def test_a_line_for_the_file_of_users(tmp_path: Path) -> None:
    found = subprocess.run(
        [*COMMAND, "console", "user", "anna", "--role", "operator"],
        input="long secret\n",
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=True,
    )
    (tmp_path / "users").write_text(found.stdout)
    assert FileUsers(tmp_path / "users").check("anna", "long secret") == User("anna", Role.OPERATOR)

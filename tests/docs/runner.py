"""Runs the blocks of a page as a reader would: shell blocks in one shell's folder and environment, Python blocks in one
interpreter, servers until the page ends. Pages with Spark run in the process of the tests, whose session they find.

The text that runs is the text that readers see, with two exceptions, so that pages can be tested while other servers
run. A port on a page (`PORTS`) is replaced by a free one, everywhere on the page, and back in the output. A server that
is started on its default ports gets the replaced ports as options. A page that starts no server finds one at the
default ports. A block of ``make`` calls is a dry run. ``HOME`` is the page's folder. ``rmq`` runs `commands`.
"""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stdout
from pathlib import Path
from threading import Timer
from types import ModuleType
from typing import IO

import pytest

from tests.docs.blocks import Block, PageError, differs
from tests.docs.interpreter import END
from tests.docs.interpreter import run as run_code
from tests.ports import free_port

PORTS = (9876, 9877, 10911, 10912, 10921, 10922, 10931, 10932, 10941, 10942, 5557, 5558, 8000, 8081)
SECONDS_MAX = 200.0
READY_SECONDS = 150.0
_NEAR = 40

_ROOT = Path(__file__).parents[2]
_BIN = Path(sys.executable).parent
_PATIENT = Path(__file__).parent / "bin"
_SERVER = re.compile(r"rmq (standalone|namesrv|broker)\b(?! [a-z])(?!.*(?: -p\b|--print-config|--help))")
_WEB_SERVICE = re.compile(r"uvicorn \w+:\w+")
_DEFAULT_PORTS = {
    "standalone": (("--namesrv-port", 9876), ("--port", 10911)),
    "namesrv": (("--port", 9876),),
    "broker": (("--port", 10911),),
}
_PYTHON = {
    "PYTHONPYCACHEPREFIX": str(_ROOT / ".cache/bytecode"),
    "PYTHONDONTWRITEBYTECODE": "",
}  # compiled once for all pages
_SHELL = """set -euo pipefail
. ./.environment
cd "$(cat .cwd)"
trap 'export -p > {folder}/.environment; env -0 > {folder}/.exported; pwd > {folder}/.cwd' EXIT
"""


def free_ports() -> dict[int, int]:
    """Return every port that pages name → a free port. The ports of one server have the same distances as before."""
    found: dict[int, int] = {}
    for port in PORTS:
        if port not in found:
            near = [other for other in PORTS if port <= other < port + _NEAR]
            shift = _free_shift(near)
            found |= {other: other + shift for other in near}
    return found


def _free_shift(ports: list[int]) -> int:
    """Return the distance by which to move some ports so that they, and the additional ports of brokers, are free."""
    first = ports[0]
    return free_port(*(port + step - first for port in ports for step in (-2, 0, 1))) - first


def is_make(block: Block) -> bool:
    """Return True if a block only calls make: tests check that the targets exist, and do not run them."""
    return all(line.startswith("make ") for line in block.text.splitlines())


def starts_server(block: Block) -> str:
    """Return the kind of server that the last line of a block starts, or an empty string."""
    last = block.text.rstrip().rsplit("\n", 1)[-1].removeprefix(".venv/bin/")
    server = _SERVER.match(last) if block.is_run and block.language == "sh" else None
    return server[1] if server is not None else ""


class Interpreter:
    """A process that runs Python blocks."""

    def __init__(self, folder: Path) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        command = [sys.executable, "-u", "-m", "tests.docs.interpreter"]
        environment = {
            **os.environ,
            **_PYTHON,
            "PYTHONPATH": str(_ROOT),
            "PYTHONSAFEPATH": "1",
        }
        self._process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    def run(self, block: Block, code: str, folder: Path, environment: Mapping[str, str], seconds: float) -> str:
        """Run a block and return its output. Raises PageError: it fails, or takes too long."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        asked = {"page": str(block.page), "line": block.line, "code": code, "folder": str(folder)}
        self._log.seek(0, os.SEEK_END)
        said_before = self._log.tell()
        timer = Timer(seconds, self._process.kill)
        timer.start()
        try:
            self._process.stdin.write(json.dumps({**asked, "environment": dict(environment)}) + "\n")
            self._process.stdin.flush()
            printed, ended = _until_end(self._process.stdout)
        finally:
            timer.cancel()
        if ended != "True":
            self._log.seek(said_before)
            said = self._log.read().decode(errors="replace")[-4000:]
            raise PageError(f"{block.place}: {'failed' if ended else f'did not end in {seconds} s'}\n{printed}{said}")
        return printed

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(100)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()  # type: ignore[union-attr]
        self._log.close()


class Here:
    """Runs the Python blocks of a page in this process."""

    def __init__(self) -> None:
        self._module = ModuleType("__main__")

    def run(self, block: Block, code: str, folder: Path, environment: Mapping[str, str], seconds: float) -> str:
        """Run a block and return its output. Raises PageError: it fails. The time limit is that of the test."""
        printed = io.StringIO()
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed):
            patch.chdir(folder)
            patch.setitem(sys.modules, "__main__", self._module)  # so that functions are pickled by value
            for name, value in environment.items():
                patch.setenv(name, value)
            try:
                run_code(str(block.page), block.line, code, self._module)
            except Exception:  # noqa: BLE001 - a block's error is raised with its place
                raise PageError(f"{block.place}: failed\n{printed.getvalue()}{traceback.format_exc()}") from None
        return printed.getvalue()


def _until_end(lines: IO[str]) -> tuple[str, str]:
    printed = []
    for line in lines:
        before, found, ended = line.partition(END)
        printed.append(before)
        if found:
            return "".join(printed), ended.strip()
    return "".join(printed), ""


class PageRun:
    """The run of a page: its folder, its environment, its servers."""

    def __init__(self, folder: Path, ports: Mapping[int, int], here: Here | None = None) -> None:
        self._folder = folder
        self._ports = dict(ports)
        self._has_grpc = False
        self._here = here
        self._own: Interpreter | None = None
        self._stack = ExitStack()
        self._environment = {
            **os.environ,
            **_PYTHON,
            "HOME": str(folder),
            "XDG_CONFIG_HOME": str(folder / ".config"),
            "XDG_STATE_HOME": str(folder / ".local/state"),
            "PATH": f"{_PATIENT}:{_BIN}:{os.environ['PATH']}",
            "COLUMNS": "120",
            "NO_COLOR": "1",
            "NAMESRV_ADDR": self._tested("127.0.0.1:9876"),  # the default address of commands
        }
        (folder / ".environment").write_text("")
        (folder / ".cwd").write_text(str(folder))

    def __enter__(self) -> PageRun:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    def run(self, block: Block) -> None:
        """Run a block, or write it as a file. Raises PageError: it fails, or prints something else."""
        if block.title and not block.not_run:
            path = self._folder / block.title
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(self._tested(block.text))
        elif block.is_run:
            printed = self._shown(self._python(block) if block.language == "python" else self._shell(block))
            difference = None if block.shown is None else differs(block.shown, printed)
            if difference is not None:
                raise PageError(f"{block.place}: {difference}")

    def _tested(self, text: str) -> str:
        return re.sub(r"\b(\d{4,5})\b", lambda port: str(self._ports.get(int(port[1]), port[1])), text)

    def _shown(self, text: str) -> str:
        shown = {str(used): str(port) for port, used in self._ports.items()}
        text = text.replace(str(self._folder), "~")
        return re.sub(r"\b(\d{4,5})\b", lambda port: shown.get(port[1], port[1]), text)

    def _python(self, block: Block) -> str:
        interpreter: Interpreter | Here | None = self._here or self._own
        if interpreter is None:
            interpreter = self._own = Interpreter(self._folder)
            self._stack.callback(interpreter.close)
        environment = {**self._environment, **self._exported()}
        return interpreter.run(block, self._tested(block.text), self._folder, environment, SECONDS_MAX)

    def _exported(self) -> dict[str, str]:
        saved = self._folder / ".exported"
        pairs = saved.read_text().split("\0")[:-1] if saved.exists() else []
        return dict(pair.split("=", 1) for pair in pairs)

    def _shell(self, block: Block) -> str:
        if is_make(block):
            return self._bash(block, block.text.replace("make ", f"make -C {_ROOT} --dry-run --silent "))
        text, kind = self._tested(block.text), starts_server(block)
        if kind:
            return self._server(block, text.rstrip(), kind)
        if _WEB_SERVICE.fullmatch(text.rstrip()):
            return self._web_service(block, text.rstrip())
        return self._bash(block, text.replace(".venv/bin/", ""))

    def _bash(self, block: Block, text: str) -> str:
        command = ["bash", "-c", _SHELL.format(folder=self._folder) + text]
        with subprocess.Popen(
            command,
            cwd=self._folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                printed, _ = process.communicate(timeout=SECONDS_MAX)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                raise PageError(f"{block.place}: did not end in {SECONDS_MAX} s\n{process.communicate()[0]}") from None
        if process.returncode:
            raise PageError(f"{block.place}: ended with exit code {process.returncode}\n{printed}")
        return printed

    def _server(self, block: Block, text: str, kind: str) -> str:
        """Start a server that runs until the page ends. Return its first line of output."""
        configured = "".join((self._folder / name).read_text() for name in re.findall(r"-c (\S+)", text))
        for option, port in _DEFAULT_PORTS[kind]:
            if option not in text and not (option == "--port" and "listenPort" in configured):
                text += f" {option} {self._ports[port]}"
        # Only the first broker of a machine has the gRPC port.
        if kind != "namesrv" and not self._has_grpc and "--shards" not in text and "SLAVE" not in configured:
            text += f" --set grpcServerPort={self._ports[8081]}"
            self._has_grpc = True
        before, _, last = text.replace(".venv/bin/", "").rpartition("\n")
        script = _SHELL.format(folder=self._folder) + f"{before}\ntrap - EXIT\nexec {last}"
        log = self._stack.enter_context(tempfile.TemporaryFile("w+"))  # noqa: SIM115 - the stack closes it
        process = self._running(script, log)
        assert process.stdout is not None
        timer = Timer(READY_SECONDS, process.kill)
        timer.start()
        first = process.stdout.readline()
        timer.cancel()
        if not first.startswith("ready "):
            log.seek(0)
            raise PageError(f"{block.place}: the server is not ready: {first}{log.read()}")
        return first

    def _web_service(self, block: Block, text: str) -> str:
        """Start a web service that runs until the page ends. Return the line with its address."""
        script = _SHELL.format(folder=self._folder) + f"trap - EXIT\nexec {text} --port {self._ports[8000]}"
        process = self._running(script, subprocess.STDOUT)
        assert process.stdout is not None
        timer = Timer(READY_SECONDS, process.kill)
        timer.start()
        printed = []
        for line in process.stdout:
            printed.append(line)
            if "running on" in line:
                timer.cancel()
                return line
        raise PageError(f"{block.place}: the service is not ready: {''.join(printed)}")

    def _running(self, script: str, errors: IO[str] | int) -> subprocess.Popen[str]:
        """Start a script that is stopped when the page ends."""
        process = subprocess.Popen(
            ["bash", "-c", script],
            cwd=self._folder,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        self._stack.callback(_stop, process)
        return process


def _stop(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(100)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()  # type: ignore[union-attr]


@contextmanager
def standalone(folder: Path, ports: Mapping[int, int]) -> Iterator[None]:
    """Run the servers for pages that start none."""
    start = Block(folder / "shared", 0, "sh", "rmq standalone --store store\n")
    with PageRun(folder, ports) as run:
        run.run(start)
        yield

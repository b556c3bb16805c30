"""The tools and modules of peers in Go, Node and C++: found, fetched and built once, as `kit` does for Java.

| Part | Where it comes from |
|---|---|
| go, node, npm | the path |
| the modules of `go/go.sum`, of `node/package-lock.json` | go, npm, once, into the cache |
| `go/*.go`, the program, with a client whose requests have time | go, once per content, into the cache |
| the package `rocketmq`, which holds the C++ client, as `requirements/peers.txt` pins it | pip, once, into the cache |

A missing part raises `Unavailable` with the reason. Each folder's ``outcome.json`` is the output of its program with
Apache's servers 5.5.0.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from tests.interop.kit import Unavailable, cache_folder, move_into_place

HERE = Path(__file__).parent
RUN_SECONDS = 400
FETCH_SECONDS = 300
# Go's own caches keep what is compiled for the next program; without optimising it takes a third less.
GO_BUILD = ("build", "-gcflags=all=-l -N", "-ldflags=-s -w")
GO_ENV = {"GOTOOLCHAIN": "local", "GOFLAGS": "-buildvcs=false"}
BUILD_SECONDS = 600
GO_MODULE = "github.com/apache/rocketmq-client-go/v2"
REQUEST_SECONDS = re.compile(r"(?<=, )[135](?=\*time\.Second\))")
"""The time-outs of requests in the Go client's source. They are too short for a busy machine: messages are sent twice
and consumers do not start."""
PATIENT_SECONDS = "100"


@dataclass(frozen=True, slots=True)
class Program:
    """A client program: its command line, additions to its environment, and its output with Apache's servers."""

    command: Sequence[str | Path]
    outcome: Mapping[str, Any]
    env: Mapping[str, str] = field(default_factory=dict)

    def start(self, home: Path, *arguments: str) -> subprocess.Popen[str]:
        """Run the program. It writes only below `home`, and may read until its standard input is closed."""
        env = {**os.environ, **self.env, "HOME": str(home)}
        pipe = subprocess.PIPE
        return subprocess.Popen(
            [*self.command, *arguments], env=env, cwd=home, stdin=pipe, stdout=pipe, stderr=pipe, text=True
        )

    def run(self, home: Path, *arguments: str) -> dict[str, Any]:
        """Return the program's output, by scenario."""
        return told(self.start(home, *arguments))


def told(running: subprocess.Popen[str]) -> dict[str, Any]:
    """Close a program's standard input, wait for its end, and return its output."""
    with running:
        try:
            output, errors = running.communicate(timeout=RUN_SECONDS)
        except subprocess.TimeoutExpired:
            running.kill()
            raise
    assert running.returncode == 0, f"{running.args} ended with {running.returncode}: {errors[-2000:]}"
    return msgspec.json.decode(output, type=dict[str, Any])


def prepare_go() -> Program:
    """Return Apache's Go client in the version of `go/go.mod`. Raises Unavailable."""
    folder = HERE / "go"
    program = cached("patient-go-client", sorted([*folder.glob("*.go"), *folder.glob("go.*")]))
    if not program.exists():
        go = find_tool("go")
        fetch([go, "mod", "download"], folder, GO_ENV)
        with tempfile.TemporaryDirectory(dir=program.parent, prefix="building-") as built:
            module = complete([go, "list", "-m", "-f", "{{.Dir}}", GO_MODULE], folder, GO_ENV).stdout.strip()
            made_of = _patient(Path(module), folder, Path(built))
            command = [go, *GO_BUILD, f"-modfile={made_of}", "-o", f"{built}/program", "."]
            done = complete(command, folder, GO_ENV, BUILD_SECONDS)
            assert done.returncode == 0, f"go build failed in {folder}:\n{done.stderr}"
            move_into_place(Path(built, "program"), program)
    return Program([program], _outcome(folder))


def _patient(module: Path, program: Path, folder: Path) -> Path:
    """Write a go.mod for the program that uses a copy of a module with longer time-outs of requests."""
    copy = shutil.copytree(module, folder / "patient")
    found = 0
    for source in copy.rglob("*.go"):
        patient, count = REQUEST_SECONDS.subn(PATIENT_SECONDS, source.read_text())
        if count:
            source.write_text(patient)
        found += count
    assert found, f"no request in {module} names its seconds"
    shutil.copy(program / "go.sum", folder)
    made_of = folder / "go.mod"
    made_of.write_text(f"{(program / 'go.mod').read_text()}\nreplace {GO_MODULE} => {copy}\n")
    return made_of


def prepare_node() -> Program:
    """Return the Node client of `node/package.json`. Raises Unavailable."""
    folder = HERE / "node"
    return Program(
        [find_tool("node"), folder / "client.js"], _outcome(folder), {"NODE_PATH": str(node_modules(folder))}
    )


def node_modules(folder: Path) -> Path:
    """Return the installed modules of a folder's `package-lock.json`. Raises Unavailable."""
    pinned = sorted(folder.glob("package*.json"))
    modules = cached("node-modules", pinned)
    if not modules.is_dir():
        npm = find_tool("npm")
        with tempfile.TemporaryDirectory(dir=modules.parent, prefix="fetching-") as fetched:
            for file in pinned:
                shutil.copy(file, fetched)
            options = ["--ignore-scripts", "--no-audit", "--no-fund", "--fetch-retries=1", f"--cache={fetched}/npm"]
            fetch([npm, "ci", *options], fetched, {})
            move_into_place(Path(fetched, "node_modules"), modules)
    return modules


def prepare_cpp() -> Program:
    """Return Apache's C++ client of the package `rocketmq`, separate from our packages. Raises Unavailable."""
    folder = HERE / "cpp"
    pins = HERE.parents[1] / "requirements" / "peers.txt"
    packages = cached("cpp-client", [pins])
    if not packages.is_dir():
        pinned = re.search(r"^rocketmq==(?:.*\\\n)*.*", pins.read_text(), re.MULTILINE)
        assert pinned is not None, f"{pins} does not name rocketmq"
        with tempfile.TemporaryDirectory(dir=packages.parent, prefix="fetching-") as fetched:
            requirement = Path(fetched, "requirement.txt")
            requirement.write_text(pinned[0])
            options = ["--quiet", "--disable-pip-version-check", "--retries=1", "--require-hashes"]
            command = [sys.executable, "-m", "pip", "install", *options, f"--target={fetched}/packages"]
            fetch([*command, f"--requirement={requirement}"], fetched, {})
            move_into_place(Path(fetched, "packages"), packages)
    python, env = [sys.executable, "-S"], {"PYTHONPATH": str(packages)}
    loaded = complete([*python, "-c", "import rocketmq.client"], packages, env)
    if loaded.returncode != 0:
        raise Unavailable(f"the C++ client cannot be loaded: {loaded.stderr.strip().splitlines()[-1]}")
    return Program([*python, folder / "client.py"], _outcome(folder), env)


def _outcome(folder: Path) -> dict[str, Any]:
    return msgspec.json.decode((folder / "outcome.json").read_bytes(), type=dict[str, Any])


def cached(name: str, sources: Sequence[Path]) -> Path:
    """Return the place in the cache of a build from these files."""
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:12]
    cache = cache_folder().absolute()
    cache.mkdir(parents=True, exist_ok=True)
    return cache / f"{name}-{digest}"


def find_tool(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise Unavailable(f"no {name} on the path")
    return found


def fetch(command: Sequence[str], folder: str | Path, env: Mapping[str, str]) -> None:
    try:
        done = complete(command, folder, env)
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{' '.join(command[:3])} took longer than {FETCH_SECONDS} s") from None
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["no message"]
        reason = next((line for line in lines if " error " in line), lines[-1])
        raise Unavailable(f"{' '.join(command[:3])} could not fetch modules: {reason[:300]}")


def complete(
    command: Sequence[str], folder: str | Path, env: Mapping[str, str], seconds: float = FETCH_SECONDS
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
        timeout=seconds,
    )

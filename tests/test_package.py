"""The packages as a user gets them: built, inspected, installed into empty environments, and used there."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

from tests.client.peers import standalone
from tests.sources import FOLDERS, ROOT

UV = [ROOT / "requirements/uv.sh", Path(sys.prefix)]
VERSION = tomllib.loads((ROOT / "packages/rmqkit/pyproject.toml").read_text())["project"]["version"]
NATIVE = ROOT / "packages" / "rmqkit-native"
SERVERS = ("rmqkit", "rmqkit-store", "rmqkit-server", "rmqkit-tools")
SECONDS_MAX = 100
CLIENT_BYTES_MAX = 25_000_000


def run(*command: object, cwd: Path = ROOT) -> str:
    clean = {name: text for name, text in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, cwd=cwd, env=clean, timeout=SECONDS_MAX)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheels and sdists with the build program of this environment."""
    folder = tmp_path_factory.mktemp("dist")
    for name in FOLDERS:
        build = ["build", "--quiet", "--no-build-isolation", "--python", sys.executable, "--out-dir", folder]
        run(*UV, *build, ROOT / "packages" / name)
    return folder


def wheel_of(built: Path, name: str) -> Path:
    return built / f"{name.replace('-', '_')}-{VERSION}-py3-none-any.whl"


def own_names(built: Path, name: str) -> set[str]:
    """Return the files of a wheel, without its metadata."""
    names = zipfile.ZipFile(wheel_of(built, name)).namelist()
    return {one for one in names if ".dist-info/" not in one}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_wheel_holds_every_source_and_nothing_else(built, name):
    sources = {
        str(path.relative_to(FOLDERS[name].parent))
        for path in FOLDERS[name].parent.rglob("*")
        if path.is_file() and path.suffix not in (".pyc", ".pyi")
    }
    assert own_names(built, name) == sources


def test_no_file_is_in_two_wheels(built):
    files = [file for name in FOLDERS for file in own_names(built, name)]
    assert len(files) == len(set(files))
    assert {"rmqkit/py.typed", "rmqkit/filter/sql92.lark", "rmqkit/spark/log4j2.properties"} <= set(files)


@pytest.mark.parametrize("name", FOLDERS)
def test_a_sdist_holds_what_its_wheel_is_built_of(built, name):
    with tarfile.open(built / f"{name.replace('-', '_')}-{VERSION}.tar.gz") as archive:
        names = {one.partition("/")[2] for one in archive.getnames()}
    wanted = {str(path.relative_to(ROOT / "packages" / name)) for path in FOLDERS[name].rglob("*.py")}
    assert {"pyproject.toml", "README.md", "LICENSE", "NOTICE", *wanted} <= names
    assert not any(part in one for one in names for part in ("__pycache__", ".venv", ".git/"))


def metadata(built: Path, name: str) -> Message:
    with zipfile.ZipFile(wheel_of(built, name)) as wheel:
        (path,) = [one for one in wheel.namelist() if one.endswith(".dist-info/METADATA")]
        return Parser().parsestr(wheel.read(path).decode())


@pytest.mark.parametrize("name", FOLDERS)
def test_the_metadata_is_what_an_index_shows(built, name):
    found = metadata(built, name)
    assert (found["Name"], found["Version"], found["Author"]) == (name, VERSION, "rmqkit contributors")
    assert (found["License-Expression"], found.get_all("License-File")) == ("Apache-2.0", ["LICENSE", "NOTICE"])
    assert found["Description-Content-Type"] == "text/markdown"
    assert found.get_payload() == (ROOT / "packages" / name / "README.md").read_text()
    assert "Private ::" not in " ".join(found.get_all("Classifier"))
    assert f"## {VERSION}" in (ROOT / "CHANGELOG.md").read_text()


def test_what_a_client_needs_is_in_no_extra_and_what_it_does_not_need_is(built):
    needs = metadata(built, "rmqkit").get_all("Requires-Dist")
    bare = {re.match(r"[\w.-]+", need)[0] for need in needs if "extra ==" not in need}
    assert bare == {"backports-zstd", "lark", "lz4", "mmh3", "msgspec"}
    server = {re.match(r"[\w.-]+", need)[0] for need in needs if "extra == 'server'" in need}
    assert server == {"rmqkit-server", "rmqkit-tools"}


@pytest.mark.parametrize("name", FOLDERS)
def test_the_licence_is_apache_s_and_lies_in_the_wheel(built, name):
    text = (ROOT / "LICENSE").read_text()
    assert text == (NATIVE / "LICENSE").read_text()
    assert text.split(maxsplit=4)[:4] == ["Apache", "License", "Version", "2.0,"]
    assert text.rstrip().endswith("limitations under the License.")
    with zipfile.ZipFile(wheel_of(built, name)) as wheel:
        for file in ("LICENSE", "NOTICE"):
            (path,) = [one for one in wheel.namelist() if one.endswith(f".dist-info/licenses/{file}")]
            assert wheel.read(path).decode() == (ROOT / file).read_text()
    assert "Apache RocketMQ" in (ROOT / "NOTICE").read_text()  # its .proto files are included


def test_the_native_part_has_the_same_version_and_names_whose_code_it_holds():
    crate = tomllib.loads((NATIVE / "Cargo.toml").read_text())["package"]
    package = tomllib.loads((NATIVE / "pyproject.toml").read_text())["project"]
    assert crate["version"] == package["version"] == VERSION
    notice = (NATIVE / "NOTICE").read_text()
    crates = {one["name"] for one in tomllib.loads((NATIVE / "Cargo.lock").read_text())["package"]}
    assert {name for name in crates if not re.search(rf"[ :]{name}[,:\n]", notice)} == {"rmqkit-native"}


def installed(built: Path, home: Path, requirements: str, *names: str) -> Path:
    """Return the Python of a new environment with some wheels and exactly the versions that a requirements file
    pins.
    """
    python = home / "bin/python"
    run(*UV, "venv", "--quiet", "--python", sys.executable, home)
    install = [*UV, "pip", "install", "--quiet", "--python", python]
    run(*install, "--require-hashes", "-r", ROOT / "requirements" / requirements)
    run(*install, "--no-deps", *(wheel_of(built, name) for name in names))
    run(*UV, "pip", "check", "--python", python)
    return python


CLIENT = """
import asyncio, sys
from rmqkit import Message, Producer
from rmqkit.protocol.compression import Compression, compress, decompress

async def main():
    async with Producer("p", sys.argv[1]) as producer:
        print((await producer.send(Message(topic="T", body=b"x"))).status.name)

asyncio.run(main())
print(*(decompress(compress(b"x" * 500, kind), 1 | kind) == b"x" * 500 for kind in Compression))
print(sorted({"typer", "rich", "uvloop", "prometheus_client"} & set(sys.modules)))
"""

EVERY_MODULE = """
import importlib, pkgutil, rmqkit
skipped = set(OTHERS)
for found in pkgutil.walk_packages(rmqkit.__path__, "rmqkit.", onerror=lambda name: None):
    if found.name not in skipped and not found.name.startswith(tuple(one + "." for one in skipped)):
        importlib.import_module(found.name)
print("imported")
"""


@pytest.mark.slow
def test_the_client_s_wheel_alone_is_small_and_talks_to_a_broker(built, tmp_path):
    python = installed(built, tmp_path / "venv", "client.txt", "rmqkit")
    (packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    run(python, "-m", "compileall", "-q", packages)  # pip compiles the files; uv does not
    assert sum(path.stat().st_size for path in packages.rglob("*") if path.is_file()) < CLIENT_BYTES_MAX
    with standalone(tmp_path) as namesrv:
        assert run(python, "-c", CLIENT, namesrv, cwd=tmp_path) == "SEND_OK\nTrue True True\n[]\n"
    assert not (tmp_path / "venv/bin/rmq").exists()


OTEL = ["rmqkit.client.observe.otel", "rmqkit.client.observe.instrumentor"]
ARCHIVE = ["archive.catalog", "archive.row_groups", "archive.rows", "archive.writing", "kernels"]
BULK = ["bulk", "index.property_columns", "offline", *ARCHIVE]
STORE = [*OTEL, *(f"rmqkit.store.{name}" for name in BULK)]
SERVER = [*STORE, "rmqkit.proxy", "rmqkit.broker.grpc_backend"]
TOOLS = [*SERVER, "rmqkit.console", "rmqkit.testing"]
"""Modules that need a package which only an extra installs."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "requirements", "below", "others"),
    [
        ("rmqkit", "client.txt", (), OTEL),
        ("rmqkit-store", "client.txt", ("rmqkit",), STORE),
        ("rmqkit-server", "client.txt", ("rmqkit", "rmqkit-store"), SERVER),
        ("rmqkit-tools", "run.txt", ("rmqkit", "rmqkit-store", "rmqkit-server"), TOOLS),
    ],
)
def test_each_wheel_with_what_it_depends_on_can_be_imported(built, tmp_path, name, requirements, below, others):
    python = installed(built, tmp_path / "venv", requirements, *below, name)
    assert run(python, "-c", f"OTHERS = {others!r}\n{EVERY_MODULE}", cwd=tmp_path).endswith("imported\n")


@pytest.mark.slow
def test_a_wheel_works_in_an_environment_of_its_own(built, tmp_path):
    """The environment has exactly the pinned versions for servers, and nothing for tests or Spark."""
    home = tmp_path / "venv"
    python, rmq = installed(built, home, "run.txt", *SERVERS), home / "bin/rmq"
    assert run(rmq, "--version", cwd=tmp_path).startswith(
        f"rmq {VERSION}, Python {platform.python_version()}, {platform.system()}-"
    )
    assert "standalone" in run(rmq, "--help", cwd=tmp_path)
    assert "flushDiskType=ASYNC_FLUSH" in run(rmq, "broker", "--print-config", cwd=tmp_path)
    code = """
import rmqkit
from rmqkit.filter.sql92 import compile_expression
compile_expression("a > 1 AND b IS NOT NULL")
print(rmqkit.__file__, len([getattr(rmqkit, name) for name in rmqkit.__all__]))
"""
    assert run(python, "-c", code, cwd=tmp_path).startswith(str(home))

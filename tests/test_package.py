"""The package as a user gets it: built, looked into, installed where nothing else is, and used there."""

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

ROOT = Path(__file__).parents[1]
UV = [ROOT / "requirements/uv.sh", Path(sys.prefix)]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
VERSION = PROJECT["version"]
WHEEL = f"rmqkit-{VERSION}-py3-none-any.whl"
SECONDS_MAX = 100
CLIENT_BYTES_MAX = 25_000_000


def run(*command: object, cwd: Path = ROOT) -> str:
    clean = {name: text for name, text in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, cwd=cwd, env=clean, timeout=SECONDS_MAX)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel and the sdist, made by the build program of this environment."""
    folder = tmp_path_factory.mktemp("dist")
    run(*UV, "build", "--quiet", "--no-build-isolation", "--python", sys.executable, "--out-dir", folder)
    return folder


def test_the_wheel_holds_every_source_and_nothing_else(built):
    names = set(zipfile.ZipFile(built / WHEEL).namelist())
    sources = {
        str(path.relative_to(ROOT / "src"))
        for path in (ROOT / "src/rmqkit").rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    assert {"rmqkit/py.typed", "rmqkit/filter/sql92.lark", "rmqkit/spark/log4j2.properties"} <= sources
    assert {name for name in names if not name.startswith(f"rmqkit-{VERSION}.dist-info/")} == sources


def test_the_sdist_holds_what_its_tests_and_images_need(built):
    with tarfile.open(built / f"rmqkit-{VERSION}.tar.gz") as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = (
        "pyproject.toml README.md LICENSE NOTICE CONTRIBUTING.md SECURITY.md CHANGELOG.md Makefile src/rmqkit/py.typed "
        "tests/conftest.py requirements/run.txt deploy/container/Containerfile "
        "deploy/compose/compose.yaml deploy/observability/rmqkit.rules.yaml deploy/helm/rmqkit/Chart.yaml "
        "native/src/lib.rs native/Cargo.lock native/LICENSE"
    )
    assert set(wanted.split()) <= names
    assert not any(part in name for name in names for part in ("__pycache__", ".venv", ".git/"))


def metadata(built: Path) -> Message:
    with zipfile.ZipFile(built / WHEEL) as wheel:
        return Parser().parsestr(wheel.read(f"rmqkit-{VERSION}.dist-info/METADATA").decode())


def test_the_metadata_is_what_an_index_shows(built):
    found = metadata(built)
    assert (found["Name"], found["Version"], found["Author"]) == ("rmqkit", VERSION, "rmqkit contributors")
    assert (found["License-Expression"], found.get_all("License-File")) == ("Apache-2.0", ["LICENSE", "NOTICE"])
    assert found["Description-Content-Type"] == "text/markdown"
    assert found.get_payload() == (ROOT / "README.md").read_text()
    assert "Private ::" not in " ".join(found.get_all("Classifier"))
    assert f"## {VERSION}" in (ROOT / "CHANGELOG.md").read_text()


def test_what_a_client_needs_is_in_no_extra_and_what_it_does_not_need_is(built):
    needs = metadata(built).get_all("Requires-Dist")
    bare = {re.match(r"[\w.-]+", need)[0] for need in needs if "extra ==" not in need}
    assert bare == {"backports-zstd", "lark", "lz4", "mmh3", "msgspec"}
    server = {re.match(r"[\w.-]+", need)[0] for need in needs if "extra == 'server'" in need}
    assert server == {"prometheus-client", "rich", "typer", "uvloop"}


def test_the_licence_is_apache_s_and_lies_in_the_wheel(built):
    text = (ROOT / "LICENSE").read_text()
    assert text == (ROOT / "native/LICENSE").read_text()
    assert text.split(maxsplit=4)[:4] == ["Apache", "License", "Version", "2.0,"]
    assert text.rstrip().endswith("limitations under the License.")
    with zipfile.ZipFile(built / WHEEL) as wheel:
        for name in ("LICENSE", "NOTICE"):
            assert wheel.read(f"rmqkit-{VERSION}.dist-info/licenses/{name}").decode() == (ROOT / name).read_text()
    assert "Apache RocketMQ" in (ROOT / "NOTICE").read_text()  # whose .proto files are inside


def test_the_native_part_has_the_same_version_and_names_whose_code_it_holds():
    crate = tomllib.loads((ROOT / "native/Cargo.toml").read_text())["package"]
    package = tomllib.loads((ROOT / "native/pyproject.toml").read_text())["project"]
    assert crate["version"] == package["version"] == VERSION
    notice = (ROOT / "native/NOTICE").read_text()
    crates = {one["name"] for one in tomllib.loads((ROOT / "native/Cargo.lock").read_text())["package"]}
    assert {name for name in crates if not re.search(rf"[ :]{name}[,:\n]", notice)} == {"rmqkit-native"}


def installed(built: Path, home: Path, requirements: str) -> Path:
    """The Python of an environment with the wheel and exactly what a file pins."""
    python = home / "bin/python"
    run(*UV, "venv", "--quiet", "--python", sys.executable, home)
    install = [*UV, "pip", "install", "--quiet", "--python", python]
    run(*install, "--require-hashes", "-r", ROOT / "requirements" / requirements)
    run(*install, "--no-deps", built / WHEEL)
    run(*UV, "pip", "check", "--python", python)
    return python


CLIENT_AND_BROKER = """
import asyncio, sys, tempfile
from pathlib import Path
from rmqkit import Message, Producer
from rmqkit.protocol.compression import Compression, compress, decompress
from rmqkit.standalone import Standalone

async def main():
    with tempfile.TemporaryDirectory() as folder:
        async with Standalone(Path(folder)) as both, Producer("p", both.namesrv_address) as producer:
            print((await producer.send(Message(topic="T", body=b"x"))).status.name)

asyncio.run(main())
print(*(decompress(compress(b"x" * 500, kind), 1 | kind) == b"x" * 500 for kind in Compression))
print(sorted({"typer", "rich", "uvloop", "prometheus_client"} & set(sys.modules)))
"""


@pytest.mark.slow
def test_a_bare_installation_is_small_and_has_client_and_broker(built, tmp_path):
    python = installed(built, tmp_path / "venv", "client.txt")
    (packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    run(python, "-m", "compileall", "-q", packages)  # as pip does, and uv does not
    assert sum(path.stat().st_size for path in packages.rglob("*") if path.is_file()) < CLIENT_BYTES_MAX
    assert run(python, "-c", CLIENT_AND_BROKER, cwd=tmp_path) == "SEND_OK\nTrue True True\n[]\n"
    done = subprocess.run([tmp_path / "venv/bin/rmq", "send", "T", "x"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    told = f"rmq: the command rmq needs typer, which is not installed: pip install '{built / WHEEL}[cli]'\n"
    assert done.stderr == told


@pytest.mark.slow
def test_a_wheel_works_in_an_environment_of_its_own(built, tmp_path):
    """With exactly the pinned versions of what servers need, and nothing for tests or Spark."""
    home = tmp_path / "venv"
    python, rmq = installed(built, home, "run.txt"), home / "bin/rmq"
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

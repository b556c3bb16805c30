"""One line for a package that is not installed, with the command that installs it."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from rmqkit import extras
from rmqkit.errors import ExitCode, ExtraMissing, exit_code
from rmqkit.metrics import ExporterType
from rmqkit.namesrv.server import NameServer
from rmqkit.namesrv.settings import NamesrvSettings

WHEEL = "rmqkit-0.2.0-py3-none-any.whl"


@pytest.fixture
def installed_from(monkeypatch):
    """Make rmqkit look as if it was installed from a given place."""

    def install(direct_url: dict | None) -> None:
        text = None if direct_url is None else json.dumps(direct_url)
        monkeypatch.setattr("importlib.metadata.distribution", lambda name: SimpleNamespace(read_text=lambda _: text))

    return install


def test_an_installation_of_an_index_is_added_to_by_name(installed_from):
    installed_from(None)
    assert extras.install("server") == "pip install 'rmqkit[server]'"


def test_one_of_a_checkout_or_a_wheel_names_the_place(installed_from, tmp_path):
    checkout, wheel = tmp_path / "a checkout", tmp_path / WHEEL
    package = checkout / "packages" / "rmqkit"
    package.mkdir(parents=True)
    wheel.touch()
    installed_from({"url": package.as_uri(), "dir_info": {"editable": True}})
    assert extras.install("spark") == f"pip install '{checkout}[spark]'"
    installed_from({"url": wheel.as_uri(), "archive_info": {}})
    assert extras.install("cli") == f"pip install --find-links '{tmp_path}' '{wheel}[cli]'"
    wheel.unlink()
    assert extras.install("cli") == "pip install 'rmqkit[cli]'"


def test_one_of_a_repository_names_it(installed_from):
    installed_from({"url": "https://example.org/rmqkit.git", "vcs_info": {"vcs": "git", "commit_id": "1f"}})
    assert extras.install("grpc") == "pip install 'rmqkit-checkout[grpc] @ git+https://example.org/rmqkit.git'"


def test_this_installation_names_its_checkout():
    assert extras.install("server") == f"pip install '{Path(__file__).parents[1]}[server]'"


def test_a_package_that_is_missing_is_reported_with_what_needs_it(monkeypatch, installed_from):
    installed_from(None)
    monkeypatch.setitem(sys.modules, "google", None)
    with pytest.raises(ExtraMissing) as caught, extras.needed("grpc", "rmq proxy"):
        import google.protobuf  # noqa: F401
    assert str(caught.value) == "rmq proxy needs protobuf, which is not installed: pip install 'rmqkit[grpc]'"
    assert exit_code(caught.value) == ExitCode.USAGE


FRAMEWORKS = [
    ("rmqkit.faststream", "faststream", "faststream", "faststream"),
    ("rmqkit.kombu", "kombu", "kombu", "celery"),
    ("rmqkit.mcp", "mcp", "mcp", "mcp"),
    ("rmqkit.a2a", "a2a", "a2a-sdk", "a2a"),
    ("rmqkit.channels", "channels", "channels", "channels"),
    ("rmqkit.client.observe.otel", "opentelemetry", "OpenTelemetry", "otel"),
    ("rmqkit.client.observe.instrumentor", "opentelemetry.instrumentation", "OpenTelemetry", "otel"),
]


@pytest.mark.parametrize(("ours", "module", "package", "extra"), FRAMEWORKS)
def test_the_part_for_a_framework_that_is_missing_says_so(ours, module, package, extra, monkeypatch):
    for name in [name for name in sys.modules if name.startswith((ours, f"{module}."))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ExtraMissing) as caught:
        importlib.import_module(ours)
    assert str(caught.value) == f"{ours} needs {package}, which is not installed: {extras.install(extra)}"


def test_a_package_of_another_release_is_reported(installed_from):
    installed_from(None)
    with pytest.raises(ExtraMissing) as caught, extras.needed("testing", "a fixture"):
        from msgspec import no_such_name  # noqa: F401
    told = "a fixture needs another release of msgspec, which is not installed: pip install 'rmqkit[testing]'"
    assert str(caught.value) == told


def test_a_module_of_ours_that_is_missing_is_a_fault():
    with pytest.raises(ImportError, match="no_such_module"), extras.needed("grpc", "rmq proxy"):
        import rmqkit.no_such_module  # noqa: F401


def test_the_command_without_its_extra_says_so_in_one_line():
    code = "import sys; sys.modules['typer'] = None; from rmqkit.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (ExitCode.USAGE, "")
    told = f"rmq: the command rmq needs typer, which is not installed: {extras.install('cli')}\n"
    assert done.stderr == told


async def test_an_exporter_without_its_library_stops_the_start(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    settings = NamesrvSettings(
        listen_port=0,
        bind_address="127.0.0.1",
        kv_config_path=str(tmp_path / "kv.json"),
        exporter_type=ExporterType.PROM,
        exporter_port=0,
    )
    with pytest.raises(ExtraMissing, match="metricsExporterType=PROM needs prometheus-client"):
        await NameServer(settings).start()

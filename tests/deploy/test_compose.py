"""The compose files: their form, their references, and the commands of their services."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import tomllib

import pytest

from rmqkit import Message, StartFrom, sync
from tests.deploy.compose import CLUSTER, COMPOSE, FOLDER, environment, interpolated, words
from tests.deploy.images import CONTAINERFILE, IMAGES, instruction
from tests.deploy.pods import BIN, DATA, DEPLOY, ROOT, SECONDS_MAX, documents, pods
from tests.interop.server_process import ServerProcess, wait_until
from tests.patience import producing, pushing

FILES = {"compose.yaml": COMPOSE, "cluster.yaml": CLUSTER}
OURS = [
    (f"{file}-{name}", one) for file, all_ in FILES.items() for name, one in all_["services"].items() if "build" in one
]
SERVICES = [pytest.param(one, id=name) for name, one in OURS]
SERVERS = [pytest.param(one, id=name) for name, one in OURS if "environment" in one]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


@pytest.mark.parametrize("file", FILES)
def test_a_file_follows_the_schema_of_compose(file):
    command = [BIN / "check-jsonschema", "--builtin-schema", "vendor.compose-spec", FOLDER / file]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS_MAX)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("file", FILES)
def test_an_engine_reads_a_file(file):
    engine = next((one for one in ("docker-compose", "podman-compose") if shutil.which(one)), None)
    if engine is None:
        pytest.skip(
            "neither docker-compose nor podman-compose is here: the file is held against the schema all the same"
        )
    done = subprocess.run([engine, "-f", FOLDER / file, "config"], capture_output=True, text=True, timeout=SECONDS_MAX)
    assert done.returncode == 0, done.stderr


def test_the_containerfile_has_no_fault_that_hadolint_knows():
    hadolint = BIN / "hadolint"
    if not hadolint.exists():
        pytest.skip("hadolint has no wheel for this machine")
    command = [hadolint, DEPLOY / "container/Containerfile"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS_MAX)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_release_workflow_follows_its_schema():
    workflow = ROOT / ".github/workflows/release.yml"
    command = [BIN / "check-jsonschema", "--builtin-schema", "vendor.github-workflows", workflow]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS_MAX)
    assert done.returncode == 0, done.stdout
    assert set(re.findall(r"make (\w+)", workflow.read_text())) <= set(
        re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    )


@pytest.mark.parametrize("service", SERVICES)
def test_an_image_is_of_this_version_and_of_a_stage_that_exists(service):
    target = service["build"]["target"]
    assert target in IMAGES
    assert interpolated(service["image"]) == f"rmqkit-{target}:{VERSION}"
    assert (FOLDER / service["build"]["context"] / service["build"]["dockerfile"]).samefile(
        DEPLOY / "container/Containerfile"
    )


@pytest.mark.parametrize("file", FILES)
def test_volumes_are_declared_or_are_files_of_the_checkout(file):
    named = set(FILES[file]["volumes"])
    used = [one.split(":") for service in FILES[file]["services"].values() for one in service["volumes"]]
    for source, place, *_ in used:
        assert (FOLDER / source).exists() if source.startswith(".") else source in named, source
        assert place.startswith("/")
    assert named == {source for source, *_ in used if not source.startswith(".")}
    written = [service for service in FILES[file]["services"].values() if "build" in service]
    assert all(service["volumes"][0].endswith(f":{DATA}") for service in written)
    assert f"VOLUME {DATA}" in CONTAINERFILE


@pytest.mark.parametrize("service", SERVERS)
def test_every_variable_is_a_setting_that_takes_effect(service):
    environ = environment(service, HOST_IP="192.0.2.7")
    if service["build"]["target"] == "broker":  # other programs may have the gRPC port, and their commands set it
        environ["RMQCONF_grpcServerPort"] = "-1"
    command = [BIN / "rmq", *words(service), "--print-config", "--json"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=SECONDS_MAX)
    assert (done.returncode, done.stderr) == (0, "")
    config = {row["key"]: row for row in json.loads(done.stdout)}
    for name, text in environ.items():
        row = config[name.removeprefix("RMQCONF_")]
        assert (str(row["value"]), row["source"]) == (text, f"environment {name}")


@pytest.mark.parametrize("service", [one for one in SERVERS if one.values[0]["build"]["target"] == "broker"])
def test_what_clients_connect_to_is_published_under_its_own_number_and_healthy(service):
    environ = environment(service)
    port = int(environ.get("RMQCONF_listenPort", 10911))
    published = {int(one.split(":")[-2]): int(one.split(":")[-1]) for one in service["ports"]}
    assert {port: port, port - 2: port - 2}.items() <= published.items()
    if environ.get("RMQCONF_brokerRole") == "SYNC_MASTER":
        assert published[port + 1] == port + 1  # a slave on another host connects to it
    of_image = json.loads(instruction("broker", "HEALTHCHECK").partition(" CMD ")[2])
    health = service["healthcheck"]["test"][1:] if "healthcheck" in service else of_image
    assert health == [word.replace(":10911", f":{port}") for word in of_image]


def test_no_two_services_of_the_cluster_publish_one_port():
    published = [
        one.rpartition(":")[0].rpartition(":")[2]
        for service in CLUSTER["services"].values()
        for one in service["ports"]
    ]
    assert len(published) == len(set(published))


def test_a_client_outside_uses_the_standalone(tmp_path):
    """The name server returns the host's loopback address, independent of the address on which the container
    listens.
    """
    service = COMPOSE["services"]["rmqkit"]
    own = [word.replace("0.0.0.0", "127.0.0.1") for word in words(service)]
    with pods(tmp_path) as start:
        at = start(
            "rmqkit", [*own, "--namesrv-port", "0"], {}, {}, environment(service), mappedFileSizeCommitLog="1048576"
        )
        name_server = at.process.wait_ready(r"^ready namesrv=(\S+)", SECONDS_MAX)[1]
        with sync.Producer("shop", name_server, settings=producing()) as producer:
            result = producer.send(Message(topic="Orders", body=b"17"))
        assert result.status.name == "SEND_OK"
    written = {path.relative_to(tmp_path).parts[:2] for path in tmp_path.rglob("*") if path.is_file()}
    assert written == {("rmqkit", "data"), ("rmqkit.log",)}


def test_the_cluster_s_services_form_a_shard_with_two_copies(shard):
    assert set(shard.sent) == {"SEND_OK"}  # the slave had the messages before the producer got its answers
    for service in shard.pods:
        assert f'node_type="{"nameserver" if "namesrv" in service else "broker"}"' in shard.page(service)
    wanted, received, done = {b"%d" % number for number in range(len(shard.sent))}, set(), threading.Event()

    def take(message):
        received.add(message.body)
        if received >= wanted:
            done.set()

    settings = pushing(start_from=StartFrom.FIRST_OFFSET)
    with sync.PushConsumer("billing", shard.name_server, settings=settings) as consumer:
        consumer.subscribe("Orders", handler=take)
        assert done.wait(SECONDS_MAX), wanted - received


def test_the_console_of_the_cluster_shows_it_and_is_healthy(shard, tmp_path):
    service = CLUSTER["services"]["console"]
    here = {"namesrv-a:9876;namesrv-b:9876": shard.name_server, "0.0.0.0": "127.0.0.1"}
    command = [BIN / "rmq", *(here.get(word, word) for word in words(service)), "--port", "0"]
    health = json.loads(instruction("console", "HEALTHCHECK").partition(" CMD ")[2])
    assert service["ports"] == ["127.0.0.1:9875:9875"], (
        "only the host itself reaches the console, which needs no password"
    )
    environ = {**os.environ, "HOME": str(tmp_path)}
    environ.pop("XDG_STATE_HOME", None)
    with ServerProcess(command, tmp_path / "log", environ) as console:
        address = console.wait_ready(r"^ready console=http://(\S+)/$", SECONDS_MAX)[1]
        asking = [sys.executable, *(word.replace("127.0.0.1:9875", address) for word in health[1:])]
        # It is healthy only after it has queried the cluster once.
        wait_until(
            lambda: subprocess.run(asking, capture_output=True, timeout=SECONDS_MAX).returncode == 0,
            SECONDS_MAX,
            f"healthy console at {address}",
        )
        assert console.stop(signal.SIGTERM, SECONDS_MAX) == 0, console.log_tail()
    assert health[0] == "python"


def test_prometheus_and_grafana_find_their_targets():
    services = CLUSTER["services"]
    (told,) = documents(DEPLOY / "observability/prometheus.yaml")
    (job,) = told["scrape_configs"]
    (targets,) = job["static_configs"]
    exporting = {name for name, one in services.items() if "RMQCONF_metricsExporterType" in one.get("environment", {})}
    assert set(targets["targets"]) == {f"{name}:5557" for name in exporting}
    mounted = {}  # path in a container → path here
    for name in ("prometheus", "grafana"):
        for source, place, *_ in (one.split(":") for one in services[name]["volumes"]):
            mounted[place] = FOLDER / source
    assert all(mounted[rules].is_file() for rules in told["rule_files"])
    grafana = DEPLOY / "observability/grafana"
    (provider,) = documents(grafana / "provisioning/dashboards/rmqkit.yaml")[0]["providers"]
    assert mounted[provider["options"]["path"]].samefile(grafana / "dashboards")
    assert mounted["/etc/grafana/provisioning"].samefile(grafana / "provisioning")
    (source,) = documents(grafana / "provisioning/datasources/prometheus.yaml")[0]["datasources"]
    assert source["url"] == "http://prometheus:9090"

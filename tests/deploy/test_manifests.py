"""The files of `deploy/`, checked without a container engine, a cluster or a running systemd: schemas, references, and
the commands of the manifests, run here with other ports and folders."""

from __future__ import annotations

import configparser
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import kubernetes_validate
import pytest

from rmqkit import PushConsumerSettings
from rmqkit.admin.diagnosis import doctor
from rmqkit.settings import parse_properties
from tests.deploy.chart import CASES, path_of
from tests.deploy.images import IMAGES, STAGES, instruction, user_of_image
from tests.deploy.pods import BIN, CONFIG, DATA, DEPLOY, ROOT, SECONDS_MAX, documents, pods, probe, rmq
from tests.interop.server_process import ServerProcess, wait_until

VERSIONS = ("1.29", kubernetes_validate.latest_version())

MANIFESTS = {
    **{path.name: documents(path) for path in (DEPLOY / "kubernetes").glob("*.yaml")},
    **{f"chart-{case}": documents(path_of(case)) for case in CASES},
}
RESOURCES = [(name, resource) for name, resources in MANIFESTS.items() for resource in resources]
SETS = [(name, resource) for name, resource in RESOURCES if resource["kind"] == "StatefulSet"]
IDS = [f"{name}-{resource['kind']}-{resource['metadata']['name']}" for name, resource in RESOURCES]


# -- Kubernetes


@pytest.mark.parametrize(("name", "resource"), RESOURCES, ids=IDS)
def test_a_manifest_follows_the_schema(name, resource):
    for version in VERSIONS[:1] if name.startswith("chart-") else VERSIONS:
        kubernetes_validate.validate(resource, version, strict=True)


@pytest.mark.parametrize(("name", "resource"), SETS, ids=[f"{name}-{one['metadata']['name']}" for name, one in SETS])
def test_what_a_set_refers_to_exists(name, resource):
    services = {one["metadata"]["name"]: one["spec"] for one in MANIFESTS[name] if one["kind"] == "Service"}
    configs = {one["metadata"]["name"]: one["data"] for one in MANIFESTS[name] if one["kind"] == "ConfigMap"}
    spec, pod = resource["spec"], resource["spec"]["template"]["spec"]
    labels = spec["template"]["metadata"]["labels"]
    service = services[spec["serviceName"]]
    assert service["clusterIP"] == "None"
    assert service["selector"].items() <= labels.items()
    assert spec["selector"]["matchLabels"].items() <= labels.items()
    (container,) = pod["containers"]
    ports = {port["name"] for port in container["ports"]}
    assert {container[probe]["tcpSocket"]["port"] for probe in ("startupProbe", "livenessProbe")} <= ports
    volumes = {one["metadata"]["name"] for one in spec["volumeClaimTemplates"]}
    for volume in pod.get("volumes", ()):
        volumes.add(volume["name"])
        assert volume["configMap"]["name"] in configs
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    variables = set(re.findall(r"\$\((\w+)\)", " ".join(container["args"])))
    assert variables == {one["name"] for one in container.get("env", ())}
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert str(pod["securityContext"]["runAsUser"]) == user_of_image()
    assert container["image"].partition(":")[0].removeprefix("rmqkit-") in IMAGES


def test_the_brokers_name_servers_are_the_pods_of_their_set():
    (names,) = (one for name, one in SETS if name == "namesrv.yaml")
    host, replicas = names["metadata"]["name"], names["spec"]["replicas"]
    addresses = [f"{host}-{index}.{names['spec']['serviceName']}:9876" for index in range(replicas)]
    for name in ("broker.yaml", "broker-outside.yaml"):
        (config,) = (one for one in MANIFESTS[name] if one["kind"] == "ConfigMap")
        assert parse_properties(config["data"]["broker.conf"])["namesrvAddr"].split(";") == addresses


def test_a_consumer_has_longer_to_end_than_it_waits_for_its_handlers():
    (deployment,) = MANIFESTS["consumer.yaml"]
    pod = deployment["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > PushConsumerSettings().drain_ms / 1000 + 10
    (container,) = pod["containers"]
    interpreter, program = container["command"]
    assert interpreter == "python" and (ROOT / "examples" / program).exists()
    assert str(pod["securityContext"]["runAsUser"]) == user_of_image()
    (config,) = (one for one in MANIFESTS["broker.yaml"] if one["kind"] == "ConfigMap")
    told = {one["name"]: one["value"] for one in container["env"]}
    assert told == {"NAMESRV_ADDR": parse_properties(config["data"]["broker.conf"])["namesrvAddr"]}


def test_inside_and_outside_differ_in_the_address_that_is_reported():
    sets = {name: [one for other, one in SETS if other == name] for name in ("broker.yaml", "broker-outside.yaml")}
    for inside, outside in zip(*sets.values(), strict=True):
        told = [{one["name"]: one for one in container_of(each)["env"]} for each in (inside, outside)]
        assert told[0]["POD_IP"]["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP"
        assert told[1]["HOST_IP"]["valueFrom"]["fieldRef"]["fieldPath"] == "status.hostIP"
        assert "brokerIP1=$(POD_IP)" in container_of(inside)["args"]
        assert "brokerIP1=$(HOST_IP)" in container_of(outside)["args"]
        # The route contains brokerIP1:listenPort, so the node's port must be the pod's.
        ports = container_of(outside)["ports"]
        assert all(port["hostPort"] == port["containerPort"] for port in ports)


def container_of(resource):
    (container,) = resource["spec"]["template"]["spec"]["containers"]
    return container


@pytest.mark.parametrize(("name", "names"), [("broker-outside.yaml", "namesrv.yaml"), ("chart-sync", "chart-sync")])
def test_the_pods_commands_run_and_their_probes_agree(tmp_path, name, names):
    """Run a name server, a master and a slave, with the arguments, files and variables of their pods."""
    config = next(one for one in MANIFESTS[name] if one["kind"] == "ConfigMap")["data"]
    variables = {"POD_IP": "127.0.0.1", "HOST_IP": "127.0.0.1", "POD_INDEX": "0"}
    (name_servers,) = (one for other, one in SETS if other == names and container_of(one)["name"] == "namesrv")
    here = {"metricsPromExporterPort": "0"}
    with ExitStack() as stack:
        start = stack.enter_context(pods(tmp_path))
        namesrv = start("namesrv", container_of(name_servers)["args"], {}, {}, **here)
        here |= {"namesrvAddr": namesrv.address, "haListenPort": "0", "mappedFileSizeCommitLog": "1048576"}
        for one in (one for other, one in SETS if other == name and container_of(one)["name"] == "broker"):
            pod = start(one["metadata"]["name"], container_of(one)["args"], variables, config, **here)
            probe(container_of(one)["readinessProbe"]["exec"]["command"], pod.address)
        probe(container_of(name_servers)["readinessProbe"]["exec"]["command"], namesrv.address)
        listed = json.loads(rmq("cluster", "list", "-n", namesrv.address, "--json"))
        assert {(row["brokerName"], str(row["brokerId"])) for row in listed} == {("broker-0", "0"), ("broker-0", "1")}
        assert all(row["addr"].startswith("127.0.0.1:") for row in listed)


# -- the images


def test_the_images_are_of_a_user_who_is_not_root_and_of_files_that_exist():
    assert {"namesrv", "broker", "console"} == IMAGES
    assert int(user_of_image()) >= 10_000
    assert f"--uid {user_of_image()} " in instruction("base", "RUN")
    copied = [rest.split() for word, rest in STAGES["build"] if word == "COPY"]
    assert copied
    for *sources, _ in copied:
        assert all((ROOT / source).exists() for source in sources)
    installs = re.findall(r"pip install [^&]+", " ".join(rest for word, rest in STAGES["build"] if word == "RUN"))
    assert all("--require-hashes" in one or "--no-deps" in one for one in installs)


@pytest.mark.parametrize("image", ["broker", "namesrv"])
def test_an_image_s_entry_point_runs_and_its_health_check_agrees(tmp_path, image):
    assert json.loads(instruction("base", "ENTRYPOINT")) == ["rmq"]
    command = json.loads(instruction(image, "CMD"))
    health = json.loads(instruction(image, "HEALTHCHECK").partition(" CMD ")[2])
    port = next(word for word in health if word.startswith("127.0.0.1:")).rpartition(":")[2]
    assert port in instruction(image, "EXPOSE").split()
    assert f"listenPort={port}\n" in rmq(command[0], "--print-config")
    with pods(tmp_path) as start:
        pod = start(image, command, {}, {})
        words = probe(health, pod.address)
    assert subprocess.run([BIN / "rmq", *words], capture_output=True, timeout=SECONDS_MAX).returncode == 3
    written = {path.relative_to(tmp_path).parts[:2] for path in tmp_path.rglob("*") if path.is_file()}
    assert written <= {(image, "data"), (f"{image}.log",)}  # the volume, and the log that this test captures


def test_a_server_needs_no_right_that_the_image_s_user_lacks(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("only root can become another user; the other tests ran without being root")
    user = int(user_of_image())
    tmp_path.chmod(0o755)
    for parent in tmp_path.parents[:2]:
        parent.chmod(0o755)
    store = tmp_path / "store"
    store.mkdir()
    os.chown(store, user, user)
    script = (
        "import os, sys; os.setgid(%d); os.setuid(%d); sys.argv[0] = 'rmq'; from rmqkit.__main__ import main; main()"
    )
    try:
        subprocess.run([sys.executable, "-c", "import rmqkit.cli"], user=user, check=True, capture_output=True)
    except (PermissionError, subprocess.CalledProcessError):
        pytest.skip(f"user {user} may not read this interpreter: {sys.executable}")
    words = ["broker", "--port", 0, "--host", "127.0.0.1", "--store", store]
    command = [sys.executable, "-c", script % (user, user), *map(str, words)]
    with ServerProcess(command, tmp_path / "log", {**os.environ, "HOME": str(store)}) as process:
        process.wait_ready("^ready ", SECONDS_MAX)
        assert {path.stat().st_uid for path in store.rglob("*")} == {user}
        assert process.stop(signal.SIGTERM, SECONDS_MAX) == 0


# -- systemd

UNITS = sorted((DEPLOY / "systemd").glob("*.service"))


def unit(path: Path, folder: Path) -> tuple[configparser.ConfigParser, str]:
    """Return a unit as instance ``a``, with the commands of this environment and the folders of the test."""
    text = path.read_text().replace("/opt/rmqkit/bin", str(BIN))
    text = text.replace("%i", "a").replace(DATA, str(folder / "state")).replace(CONFIG, str(folder / "etc"))
    parsed = configparser.ConfigParser(strict=False, interpolation=None)
    parsed.optionxform = str  # type: ignore[assignment,method-assign]
    parsed.read_string(text)
    return parsed, text


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_systemd_accepts_a_unit(tmp_path, path):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not here: the unit's commands are run by the next test all the same")
    for other in UNITS:
        (tmp_path / other.name.replace("@", "@a")).write_text(unit(other, tmp_path)[1])
    command = ["systemd-analyze", "verify", "--man=no", str(tmp_path / path.name.replace("@", "@a"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS_MAX)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_a_unit_starts_reloads_and_stops(tmp_path, path):
    service = unit(path, tmp_path)[0]["Service"]
    (tmp_path / "etc").mkdir()
    config = tmp_path / "etc" / ("namesrv.conf" if "namesrv" in path.name else "broker-a.conf")
    config.write_text("listenPort=0\nbindAddress=127.0.0.1\n")
    name, home = service["Environment"].split("=")
    Path(home).mkdir(parents=True)
    assert home == str(tmp_path / "state" / service["StateDirectory"]).replace("/state/rmqkit", "/state")
    with ServerProcess(shlex.split(service["ExecStart"]), tmp_path / "log", {**os.environ, name: home}) as process:
        process.wait_ready("^ready ", SECONDS_MAX)
        subprocess.run(service["ExecReload"].replace("$MAINPID", str(process.pid)).split(), check=True)
        wait_until(lambda: f"{config} was read again" in process.log.read_text(), SECONDS_MAX, "a reload")
        assert process.stop(signal.SIGTERM, SECONDS_MAX) == 0


def test_the_kernel_settings_are_those_that_the_doctor_requests():
    wanted = parse_properties((DEPLOY / "systemd/rmqkit.sysctl").read_text())
    assert wanted
    for key, text in wanted.items():
        low, high, remedy = doctor._VM[key.removeprefix("vm.")]
        assert doctor.within(key, text, low, high, remedy).state is doctor.State.OK

"""The Helm chart. test_manifests checks the rendered files like the other manifests; here are the checks of the chart
itself.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tomllib

import jsonschema
import pytest
import yaml

from rmqkit.settings import parse_properties
from tests.deploy.chart import CASES, CHART, digest, path_of, render
from tests.deploy.pods import BIN, ROOT, SECONDS_MAX, documents

(VALUES,) = documents(CHART / "values.yaml")
SCHEMA = json.loads((CHART / "values.schema.json").read_text())


def rendered(case: str) -> list[dict]:
    return documents(path_of(case))


def by_name(resources: list[dict]) -> dict[tuple[str, str], dict]:
    return {(one["kind"], one["metadata"]["name"]): one for one in resources}


@pytest.mark.parametrize("case", CASES)
def test_what_is_kept_was_rendered_from_the_chart_as_it_is(case):
    kept = path_of(case).read_text().partition("\n")
    assert kept[0] == f"# {digest()}", (
        "the rendered chart is up to date; if not, run: python -m tests.deploy.chart (needs helm)"
    )
    if shutil.which("helm") is None:
        pytest.skip("helm is not here: the digest says that the rendering is of this chart")
    again = [one for one in yaml.safe_load_all(render(case)) if one]
    assert by_name(again) == by_name(rendered(case))


def test_helm_finds_nothing_wrong():
    if shutil.which("helm") is None:
        pytest.skip("helm is not here: it renders the chart where it is changed")
    done = subprocess.run(["helm", "lint", "--strict", CHART], capture_output=True, text=True, timeout=SECONDS_MAX)
    assert done.returncode == 0, done.stdout


def test_the_chart_has_the_version_of_the_package():
    (chart,) = documents(CHART / "Chart.yaml")
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert chart["version"] == chart["appVersion"] == version


def test_the_values_follow_their_schema_and_a_slip_of_the_pen_does_not():
    jsonschema.validate(VALUES, SCHEMA)
    images, brokers = {"images": {"broker": {"tag": "1"}}}, {"brokers": {"master": 2}}
    for slip in (images, brokers, {"brokers": {"slaves": 2}}, {"metric": {}}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**VALUES, **slip}, SCHEMA)


def test_numbers_are_written_as_numbers():
    (config,) = (one for one in rendered("small") if one["kind"] == "ConfigMap")
    assert parse_properties(config["data"]["broker.conf"])["mappedFileSizeCommitLog"] == "268435456"
    (master,) = (one for one in rendered("sync") if one["metadata"]["name"] == "rmq-master")
    (container,) = master["spec"]["template"]["spec"]["containers"]
    assert container["args"][-3:] == ["brokerRole=SYNC_MASTER", "--set", "inSyncReplicas=2"]


def test_a_broker_takes_the_file_as_it_is(tmp_path):
    for case in CASES:
        (config,) = (one for one in rendered(case) if one["kind"] == "ConfigMap")
        path = tmp_path / f"{case}.conf"
        path.write_text(config["data"]["broker.conf"])
        command = [BIN / "rmq", "broker", "-c", path, "--print-config", "--json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS_MAX)
        assert (done.returncode, done.stderr) == (0, "")
        rows = json.loads(done.stdout)
        of_file = {row["key"]: row["value"] for row in rows if row["source"].startswith(f"{path}:")}
        assert of_file == parse_properties(config["data"]["broker.conf"])


def test_what_values_leave_out_is_not_there():
    kinds = [(one["kind"], one["metadata"]["name"]) for one in rendered("small")]
    assert ("StatefulSet", "rmq-master") in kinds and ("StatefulSet", "rmq-slave") not in kinds
    text = path_of("small").read_text()
    assert "metrics" not in text and "prometheus" not in text
    assert ("Service", "rmq-namesrv-outside") not in kinds
    assert ("Service", "rmq-namesrv-outside") in [(one["kind"], one["metadata"]["name"]) for one in rendered("outside")]


def test_name_servers_are_all_named():
    for case in CASES:
        (names,) = (
            one for one in rendered(case) if one["metadata"]["name"] == "rmq-namesrv" and one["kind"] == "StatefulSet"
        )
        (config,) = (one for one in rendered(case) if one["kind"] == "ConfigMap")
        name, count = names["spec"]["serviceName"], names["spec"]["replicas"]
        addresses = [f"rmq-namesrv-{index}.{name}:9876" for index in range(count)]
        assert parse_properties(config["data"]["broker.conf"])["namesrvAddr"].split(";") == addresses


def test_a_broker_outside_is_reached_at_the_port_that_it_reports():
    for one in rendered("outside"):
        for container in one.get("spec", {}).get("template", {}).get("spec", {}).get("containers", ()):
            if container["name"] == "broker":
                told = {port["name"]: port for port in container["ports"]}
                assert all(told[name]["hostPort"] == told[name]["containerPort"] for name in ("remoting", "vip", "ha"))
                assert "brokerIP1=$(HOST_IP)" in container["args"]

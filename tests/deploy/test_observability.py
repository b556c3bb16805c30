"""Dashboards and alert rules use only metrics that our servers have. Each query is parsed here, and if Prometheus is
installed, it runs over the metrics of a shard."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path

import promql_parser
import pytest

from rmqkit.metrics import COMMON, TABLE, Kind
from tests.deploy.pods import DEPLOY, SECONDS_MAX, documents
from tests.deploy.promql import labels_out, prepared, wanted, without_limit
from tests.interop.server_process import ServerProcess
from tests.ports import HOST, free_port

FOLDER = DEPLOY / "observability"
BOARDS = {path.name: json.loads(path.read_text()) for path in sorted((FOLDER / "grafana/dashboards").glob("*.json"))}
RULES_FILE = FOLDER / "rmqkit.rules.yaml"
RULES = [rule for group in documents(RULES_FILE)[0]["groups"] for rule in group["rules"]]
PANELS = [(board, panel) for board in BOARDS.values() for panel in board["panels"] if panel["type"] != "row"]
QUERIES = {
    f"{board['title']}/{panel['title']}/{target['refId']}": prepared(target["expr"])
    for board, panel in PANELS
    for target in panel["targets"]
} | {rule["alert"]: rule["expr"] for rule in RULES}
OF_PROMETHEUS = {"up": {"job", "instance"}}
UNITS = {"none", "short", "cps", "reqps", "ms", "Bps", "bytes", "percentunit"}
SCRAPE_S = 15


def samples() -> dict[str, set[str]]:
    """Return every metric in the text of our servers, with its labels."""
    found = {}
    for metric in (one for one in TABLE if not one.absent):
        labels = {*metric.labels, *COMMON, "job", "instance"}
        if metric.kind is Kind.HISTOGRAM:
            name = metric.exposed_name
            found |= {f"{name}_sum": labels, f"{name}_count": labels, f"{name}_bucket": labels | {"le"}}
        else:
            found[metric.exposed_name] = labels
    return found


SAMPLES = samples() | OF_PROMETHEUS


@pytest.mark.parametrize("query", QUERIES.values(), ids=QUERIES)
def test_a_query_requests_metrics_and_labels_that_there_are(query):
    asked = list(wanted(query))
    assert asked
    for name, labels in asked:
        assert name in SAMPLES, f"{name} is not told by our servers"
        assert labels <= SAMPLES[name], f"{name} has no label {labels - SAMPLES[name]}"
        if re.search(rf"(rate|increase)\({name}\b", query):
            assert name.endswith(("_total", "_bucket", "_sum", "_count")), f"{name} is no counter"


@pytest.mark.parametrize(("board", "panel"), PANELS, ids=[f"{one['title']}/{other['title']}" for one, other in PANELS])
def test_a_panel_says_what_it_shows(board, panel):
    assert panel["description"].endswith(".")
    assert panel["fieldConfig"]["defaults"]["unit"] in UNITS
    assert panel["datasource"]["uid"] == "${datasource}"
    for target in panel["targets"]:
        told = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
        labels = labels_out(prepared(target["expr"]))
        # The legend contains exactly the labels that distinguish the lines.
        assert told == labels or (labels is None and told == {"node_id"}), target["expr"]


@pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS)
def test_a_dashboard_s_panels_have_numbers_of_their_own_and_do_not_overlap(board):
    panels = board["panels"]
    assert [panel["id"] for panel in panels] == list(range(1, len(panels) + 1))
    assert board["templating"]["list"][0]["type"] == "datasource"
    for variable in board["templating"]["list"][1:]:
        name, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]["query"]).groups()
        assert label in SAMPLES[name]
    for one, other in combinations([panel["gridPos"] for panel in panels], 2):
        assert one["x"] + one["w"] <= 24
        apart = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        assert apart or one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
    assert len({board["uid"] for board in BOARDS.values()}) == len(BOARDS)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_an_alert_says_who_and_what_to_do(rule):
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert set(rule["annotations"]) == {"summary", "description"}
    told = set(re.findall(r"\$labels\.(\w+)", " ".join(rule["annotations"].values())))
    assert told, "the text of the alert names a label"
    labels = labels_out(rule["expr"])
    assert told <= (labels if labels is not None else SAMPLES[next(wanted(rule["expr"]))[0]])
    assert promql_parser.parse_duration(rule.get("for", "1m"))


# -- by Prometheus itself


@pytest.fixture(scope="module")
def promtool() -> str:
    if shutil.which("promtool") is None or shutil.which("prometheus") is None:
        pytest.skip("prometheus and promtool are not here: the queries are read by the other tests all the same")
    return "promtool"


def run(*command: object) -> None:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=SECONDS_MAX)
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_accepts_the_files(promtool, tmp_path):
    run(promtool, "check", "rules", RULES_FILE)
    told = (FOLDER / "prometheus.yaml").read_text().replace("/etc/prometheus/", f"{FOLDER}/")
    (tmp_path / "prometheus.yaml").write_text(told)
    run(promtool, "check", "config", tmp_path / "prometheus.yaml")


def test_each_alert_fires_when_it_should_and_only_then(promtool):
    """`alerts.yaml` next to this file has for each alert values that fire it, and values that do not."""
    file = Path(__file__).with_name("alerts.yaml")
    tested = {one["alertname"] for group in documents(file)[0]["tests"] for one in group["alert_rule_test"]}
    assert tested == {rule["alert"] for rule in RULES}
    run(promtool, "test", "rules", file)


@pytest.fixture(scope="module")
def ask(promtool, shard, tmp_path_factory) -> Iterator[Callable[[str], list]]:
    """Yield a function that runs a query with Prometheus over the shard's metrics, with fifteen seconds between two
    readings.
    """
    folder = tmp_path_factory.mktemp("prometheus")
    first_s = int(time.time()) - 3600
    (folder / "metrics").write_text(open_metrics(shard.pages, first_s))
    data, config = folder / "data", folder / "prometheus.yaml"
    run(promtool, "tsdb", "create-blocks-from", "openmetrics", folder / "metrics", data)
    config.write_text("scrape_configs: []\n")
    address = f"{HOST}:{free_port()}"
    command = [
        "prometheus",
        f"--config.file={config}",
        f"--storage.tsdb.path={data}",
        f"--web.listen-address={address}",
    ]
    with ServerProcess(command, folder / "log") as process:
        process.wait_ready("Server is ready to receive web requests", SECONDS_MAX)

        def asked(query: str) -> list:
            words = urllib.parse.urlencode({"query": query, "time": first_s + SCRAPE_S * (len(shard.pages) - 1)})
            url = f"http://{address}/api/v1/query?{words}"
            with urllib.request.urlopen(url, timeout=SECONDS_MAX) as answer:
                return json.load(answer)["data"]["result"]

        yield asked


def open_metrics(pages: list[dict[str, str]], first_s: int) -> str:
    """Join the pages to one text with times, in the format of ``promtool tsdb create-blocks-from``."""
    lines = []
    for number, page in enumerate(pages):
        for service, text in page.items():
            target = f'job="rmqkit",instance="{service}:5557"'
            at_s = first_s + SCRAPE_S * number
            lines.append(f"up{{{target}}} 1 {at_s}\n")
            samples = [sample for sample in text.splitlines() if sample and sample[0] != "#"]
            lines += [f"{sample.replace('{', '{' + target + ',', 1)} {at_s}\n" for sample in samples]
    return "".join([*sorted(lines, key=lambda line: line.partition("{")[0]), "# EOF\n"])


@pytest.mark.parametrize("query", QUERIES.values(), ids=QUERIES)
def test_prometheus_answers_a_query_over_what_a_shard_reports(ask, query):
    # No request is refused as busy in a shard with so little load. Other codes show that answers are counted by code.
    assert ask(without_limit(query).replace('"system_busy"', '"success"'))

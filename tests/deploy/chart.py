"""The chart, as Helm renders it for some values.

The rendered files are in the folder ``chart`` next to this file, with a digest of their sources, so that they can be
tested without Helm. After a change of the chart run ``python -m tests.deploy.chart`` to render it again. This needs
``helm`` on the path.
"""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

from tests.deploy.pods import DEPLOY

CHART = DEPLOY / "helm/rmqkit"
RENDERED = Path(__file__).with_name("chart")
CASES = {
    "default": (),
    "outside": ("brokers.outside=true", "nameServers.nodePort=30876"),
    "sync": ('brokers.masterSettings={"brokerRole": "SYNC_MASTER", "inSyncReplicas": 2}',),
    "small": (
        "brokers.masters=1",
        "brokers.slaves=0",
        "nameServers.replicas=1",
        "metrics.enabled=false",
        "brokers.settings.mappedFileSizeCommitLog=268435456",
        'brokers.storage.className="fast"',
        'images.broker.tag="1.2"',
        'images.pullSecrets=[{"name": "ours"}]',
        'nodeSelector.disk="ssd"',
    ),
}
"""Values that differ from the chart's own, by case, in JSON, which keeps numbers as they are in a values file."""

_KUBERNETES = "1.31.0"


def digest() -> str:
    """Return a digest of the chart's files and the cases."""
    found = hashlib.sha256(repr(CASES).encode())
    for path in sorted(path for path in CHART.rglob("*") if path.is_file()):
        found.update(str(path.relative_to(CHART)).encode() + b"\0" + path.read_bytes())
    return found.hexdigest()


def render(case: str) -> str:
    """Render a case with Helm. Raises CalledProcessError: Helm refuses the chart."""
    command = ["helm", "template", "rmq", CHART, "--namespace", "default", "--kube-version", _KUBERNETES]
    command += [word for value in CASES[case] for word in ("--set-json", value)]
    return subprocess.run([*map(str, command)], capture_output=True, text=True, check=True).stdout


def path_of(case: str) -> Path:
    """Return the path of a rendered case."""
    return RENDERED / f"{case}.yaml"


def main() -> None:
    """Render every case."""
    RENDERED.mkdir(exist_ok=True)
    for case in CASES:
        path_of(case).write_text(f"# {digest()}\n{render(case)}")


if __name__ == "__main__":
    main()

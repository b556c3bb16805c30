"""Runs Apache's mqadmin: many commands in one virtual machine (`java/src/interop/AdminCommands.java`)."""

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.interop.kit import ApacheKit

ADMIN_HEAP_MB = 256
SECONDS_MAX = 500


def named_outputs(
    kit: ApacheKit, commands: Mapping[str, str], namesrv: str, broker: str, work_dir: Path
) -> dict[str, str]:
    """Return each command's output by its name. ``BROKER`` and ``NAMESRV`` replace the addresses in commands and
    outputs.
    """
    # On a busy machine the first command of a JVM may take longer than the 3 s for which mqadmin waits.
    lines = ["clusterList", *(command.replace("BROKER", broker) for command in commands.values())]
    _, *outputs = run_mqadmin(kit, [[*line.split(), "-n", namesrv] for line in lines], work_dir)
    shown = [output.replace(namesrv, "NAMESRV").replace(broker, "BROKER") for output in outputs]
    return dict(zip(commands, shown, strict=True))


def run_mqadmin(kit: ApacheKit, commands: Sequence[Sequence[str]], work_dir: Path) -> list[str]:
    """Return each command's output, errors included, without stack traces."""
    script = work_dir / "mqadmin.txt"
    script.write_text("".join("\t".join(command) + "\n" for command in commands), encoding="utf-8")
    jvm = kit.jvm("interop.AdminCommands", [script], heap_mb=ADMIN_HEAP_MB, work_dir=work_dir)
    done = subprocess.run(
        jvm, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=SECONDS_MAX, check=False
    )
    (work_dir / "mqadmin.log").write_text(done.stdout)
    assert done.returncode == 0, f"mqadmin ended with {done.returncode}:\n{done.stdout[-2000:]}"
    outputs = split_outputs(done.stdout)
    assert len(outputs) == len(commands), f"{len(outputs)} outputs of {len(commands)} commands:\n{done.stdout[-2000:]}"
    return outputs


def split_outputs(text: str) -> list[str]:
    """Split the text at the separators."""
    outputs: list[list[str]] = []
    for line in text.splitlines():
        if line == "#### end":
            break
        if line == f"#### {len(outputs)}":
            outputs.append([])
        elif outputs and not line.startswith("\tat ") and not line.startswith("\t... "):
            outputs[-1].append(line.rstrip())
    return ["\n".join(lines).rstrip("\n") for lines in outputs]

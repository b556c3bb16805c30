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
    """What each command printed, by its name; ``BROKER`` and ``NAMESRV`` stand for the addresses on both ways."""
    # The first command of a Java machine may take longer on a busy one than the 3 s that mqadmin waits for an answer.
    lines = ["clusterList", *(command.replace("BROKER", broker) for command in commands.values())]
    _, *outputs = run_mqadmin(kit, [[*line.split(), "-n", namesrv] for line in lines], work_dir)
    shown = [output.replace(namesrv, "NAMESRV").replace(broker, "BROKER") for output in outputs]
    return dict(zip(commands, shown, strict=True))


def run_mqadmin(kit: ApacheKit, commands: Sequence[Sequence[str]], work_dir: Path) -> list[str]:
    """What each command printed, errors included, without the stack traces' lines."""
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
    """The text between the separators."""
    outputs: list[list[str]] = []
    for line in text.splitlines():
        if line == "#### end":
            break
        if line == f"#### {len(outputs)}":
            outputs.append([])
        elif outputs and not line.startswith("\tat ") and not line.startswith("\t... "):
            outputs[-1].append(line.rstrip())
    return ["\n".join(lines).rstrip("\n") for lines in outputs]

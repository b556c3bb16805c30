"""The CPU time of exited children stays known, also if no process waits for them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from bench.commands.process_tree import ProcessTree

BURN = "import time\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass\n"
PARENT = """
import signal, subprocess, sys
{ignore}
child = subprocess.Popen([sys.executable, "-c", {child!r}], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
child.stdout.readline()
print("burnt", flush=True)
sys.stdin.readline()
child.stdin.close()
while child.stdout.read(): pass
{wait}
print("gone", flush=True)
sys.stdin.readline()
"""
CHILD = BURN + "import sys\nprint('burnt', flush=True)\nsys.stdin.readline()\n"


@pytest.mark.parametrize("waits", [True, False])
def test_ended_children_count(waits: bool) -> None:
    ignore = "" if waits else "signal.signal(signal.SIGCHLD, signal.SIG_IGN)"
    program = PARENT.format(ignore=ignore, child=CHILD, wait="child.wait()" if waits else "")
    tree = ProcessTree()
    before = tree.cpu_seconds()
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"burnt\n"
        burnt = tree.cpu_seconds()
        parent.stdin.write(b"\n")
        parent.stdin.flush()
        assert parent.stdout.readline() == b"gone\n"
        gone = tree.cpu_seconds()
        parent.stdin.close()
    assert burnt - before >= 0.2  # the kernel counts user and system time separately, in ticks of 10 ms
    assert gone - before >= 0.2


def test_an_excluded_process_does_not_count() -> None:
    tree = ProcessTree()
    with subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdout.readline()
        everything = tree.cpu_seconds()
        tree.excluded.add(child.pid)
        assert everything - tree.cpu_seconds() >= 0.2
        child.stdin.close()

"""A server of our own for a measurement: a process on loopback, stopped at the end."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rmqkit.errors import RmqError

__all__ = ["serve_standalone"]

_STOP_SECONDS = 30


@contextmanager
def serve_standalone(store: Path | None = None) -> Iterator[tuple[str, int]]:
    """Run `rmq standalone`. Yield its name server's address and its process id. Without ``store`` it has an empty one.
    Raises RmqError: it does not become ready."""
    with tempfile.TemporaryDirectory(prefix="rmq-bench-") as folder:
        command = [sys.executable, "-m", "rmqkit", "standalone", "--host", "127.0.0.1", "--port", "0"]
        command += ["--namesrv-port", "0", "--store", str(store or Path(folder) / "store")]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None, "stdout is piped"
            line = process.stdout.readline()
            if not line.startswith("ready "):
                raise RmqError(f"the standalone did not become ready, it said {line!r}")
            yield dict(word.split("=", 1) for word in line.split()[1:])["namesrv"], process.pid
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=_STOP_SECONDS)

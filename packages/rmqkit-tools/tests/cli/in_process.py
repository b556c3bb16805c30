"""The command line in the test's own process: to start a Python and import what it needs takes most of a short command.

Tests of what processes are there for (signals, pipes, locks, what is imported) start real ones.
"""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
from unittest import mock

from rmqkit.__main__ import main


def rmq(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a command as ``rmq`` does, with nothing to read."""
    command = ["rmq", *map(str, arguments)]
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(sys, "argv", command),
        mock.patch.object(sys, "stdin", io.StringIO()),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
            code: object = 0
        except SystemExit as ended:
            code = ended.code
    return subprocess.CompletedProcess(command, int(code or 0), out.getvalue(), err.getvalue())

"""The test files that need the shared Apache servers of a session, and so run in one process, one after the other."""

import functools
import re
from pathlib import Path

FOLDER = Path(__file__).parent
PAIR, PROXY = "tests/interop/", "tests/interop/grpc/"
"""The pair of name server and broker; the broker with its proxy."""
TAKES = {PAIR: re.compile(r'apache: ApachePair|getfixturevalue\("apache"\)'), PROXY: re.compile(r"apache_proxy: Place")}
"""Patterns of a shared server as an argument of a test or fixture, or of a request for it."""


@functools.cache
def shared_servers(file: Path) -> str:
    """Return the shared servers that tests of a file may request: ``PAIR``, ``PROXY`` or an empty string. The client
    suite always requests a pair.
    """
    if file.parent == FOLDER / "suite":
        return PAIR
    text = file.read_text(encoding="utf-8")
    return next((servers for servers, argument in TAKES.items() if argument.search(text)), "")

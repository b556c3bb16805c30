"""Which files need the Apache servers that a session shares, and so run in one process, one after the other."""

import functools
import re
from pathlib import Path

FOLDER = Path(__file__).parent
PAIR, PROXY = "tests/interop/", "tests/interop/grpc/"
"""A name server and a broker; a broker with its proxy."""
TAKES = {PAIR: re.compile(r'apache: ApachePair|getfixturevalue\("apache"\)'), PROXY: re.compile(r"apache_proxy: Place")}
"""An argument of a test or a fixture that is a shared server, or a request for one."""


@functools.cache
def shared_servers(file: Path) -> str:
    """What tests of this file may ask for, ``PAIR``, ``PROXY`` or nothing; all of the client suite ask for a pair."""
    if file.parent == FOLDER / "suite":
        return PAIR
    text = file.read_text(encoding="utf-8")
    return next((servers for servers, argument in TAKES.items() if argument.search(text)), "")

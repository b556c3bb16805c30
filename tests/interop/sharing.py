"""Which files need the Apache servers that a session shares, and so run in one process, one after the other."""

import functools
import re
from pathlib import Path

FOLDER = Path(__file__).parent
TAKES_SERVERS = re.compile(r'apache: ApachePair|getfixturevalue\("apache"\)')
"""An argument of a test or a fixture that is a shared pair, or a request for one."""


@functools.cache
def shares_servers(file: Path) -> bool:
    """Whether tests of this file may ask for a shared pair; all of the client suite do."""
    return file.parent == FOLDER / "suite" or TAKES_SERVERS.search(file.read_text(encoding="utf-8")) is not None

"""Runs the Python blocks of a page, which come as lines of JSON on standard input, in one namespace.

The output of a block goes to standard output, followed by a line with `END` and True if the block succeeded.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from types import ModuleType

from tests import patience

END = "\x00end of block\x00"


def main() -> None:
    patience.be_patient()
    module = ModuleType("__main__")
    sys.modules["__main__"] = module
    for line in sys.stdin:
        asked = json.loads(line)
        os.chdir(asked["folder"])
        os.environ.update(asked["environment"])
        try:
            run(asked["page"], asked["line"], asked["code"], module)
            is_well = True
        except BaseException:  # noqa: BLE001 - a block's error is printed, and the next block runs
            traceback.print_exc()
            is_well = False
        sys.stderr.flush()
        print(f"{END}{is_well}", flush=True)


def run(page: str, line: int, code: str, module: ModuleType) -> None:
    """Run a block in the namespace of a module; errors name its place on the page."""
    exec(compile("\n" * line + code, page, "exec"), module.__dict__)


if __name__ == "__main__":
    main()

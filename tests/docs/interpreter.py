"""Runs Python blocks that come as lines of JSON on standard input, those of a page in one namespace.

What a block prints goes to standard output; then comes a line with `END` and whether it ended well. The same process
may serve page after page, so that they share a Spark session.
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
    page, namespace = "", {}
    for line in sys.stdin:
        asked = json.loads(line)
        if asked["page"] != page:
            page, module = asked["page"], ModuleType("__main__")
            sys.modules["__main__"], namespace = module, module.__dict__
        os.chdir(asked["folder"])
        os.environ.update(asked["environment"])
        try:
            exec(compile("\n" * asked["line"] + asked["code"], page, "exec"), namespace)
            is_well = True
        except BaseException:  # noqa: BLE001 - a block's error is told, and the next page goes on
            traceback.print_exc()
            is_well = False
        sys.stderr.flush()
        print(f"{END}{is_well}", flush=True)


if __name__ == "__main__":
    main()

"""`rmq` as pages run it: a request has a time-out of a minute, not 5 s, and a command prints no waiting message after 2
s.

Pages show the output on an idle machine. On a busy one an answer may be late, and a retried send is stored twice.
``bin/rmq`` runs this file. Servers have no such limits.
"""

from __future__ import annotations

import sys
from typing import Any

from rmqkit.__main__ import main
from rmqkit.cli.frame import profiles

SECONDS = 60
_as_users_have_it = profiles.resolved


def resolved(context: Any, option: Any, value: Any) -> Any:
    """Return the value of a common option. The time-out of a request is longer, unless the user chose it."""
    value = _as_users_have_it(context, option, value)
    is_default = option.name == "timeout_ms" and value == option.get_default(context)
    # Commands that send have imported it by now. The others avoid the cost of the import.
    if "rmqkit.admin.messages.sending" in sys.modules:
        sys.modules["rmqkit.admin.messages.sending"].SILENT_SECONDS = SECONDS  # type: ignore[attr-defined]
    return 1000 * SECONDS if is_default else value


if __name__ == "__main__":
    profiles.resolved = resolved
    main()

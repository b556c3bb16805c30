"""`rmq` as pages run it: a request has a minute, not 5 s, and a command does not say after 2 s that it waits.

Pages show what comes on a machine with nothing else to do; on another one an answer now and then comes late, and a send
that is tried again is stored twice. ``bin/rmq`` runs this file. Servers have no such limits.
"""

from __future__ import annotations

import sys
from typing import Any

from rmqkit.__main__ import main
from rmqkit.cli.frame import profiles

SECONDS = 60
_as_users_have_it = profiles.resolved


def resolved(context: Any, option: Any, value: Any) -> Any:
    """The value of a common option; the time of a request is longer, unless somebody chose it."""
    value = _as_users_have_it(context, option, value)
    is_default = option.name == "timeout_ms" and value == option.get_default(context)
    # By now it was imported by commands that use it; the others do without what that costs.
    if "rmqkit.admin.messages.sending" in sys.modules:
        sys.modules["rmqkit.admin.messages.sending"].SILENT_SECONDS = SECONDS  # type: ignore[attr-defined]
    return 1000 * SECONDS if is_default else value


if __name__ == "__main__":
    profiles.resolved = resolved
    main()

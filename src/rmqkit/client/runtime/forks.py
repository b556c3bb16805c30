"""After ``os.fork``: connections, loops and threads belong to the parent, and the child must not touch them.

What holds some asks to be told in the child (`tell`). If it was at work, it is left behind: it refuses to be used, and
is kept for ever, since cleaning it up would work on the selector that both processes share.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["tell"]

_told: weakref.WeakKeyDictionary[object, Callable[[Any], bool]] = weakref.WeakKeyDictionary()
_left_behind: list[object] = []

T = TypeVar("T")


def tell(one: T, hook: Callable[[T], bool]) -> None:
    """Call ``hook(one)`` in every child that is forked while it exists; it says whether ``one`` is left behind.
    It may be called again, in the child's child."""
    _told[one] = hook


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        after_in_child=lambda: _left_behind.extend([one for one, hook in list(_told.items()) if hook(one)])
    )

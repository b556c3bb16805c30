"""The seam to the process. Replace it with `replaced`: each simulated process has its own number."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from rmqkit.system.seam import replaced_in

__all__ = ["number", "replaced"]

number = os.getpid
"""Return the number of this process (the PID), for ids and for the file ``abort``."""


def replaced(by: Mapping[str, Callable[..., Any]]) -> AbstractContextManager[None]:
    """Replace functions of this module by name while the context is entered. Raises ValueError: a name is unknown."""
    return replaced_in(__name__, ("number",), by)

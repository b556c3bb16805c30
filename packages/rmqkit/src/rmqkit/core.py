"""The choice between the compiled core and plain Python, made once at the start of a program."""

from __future__ import annotations

import os

from rmqkit.protocol.core import Core

__all__ = ["CORE"]

CORE = Core.of(os.environ)
"""The core of this process. ``RMQKIT_NATIVE=0`` disables it."""

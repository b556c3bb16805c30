"""The choice of the compiled core: made once, when a program starts."""

from __future__ import annotations

import os

from rmqkit.protocol.core import Core

__all__ = ["CORE"]

CORE = Core.of(os.environ)
"""The core of this process. ``RMQKIT_NATIVE=0`` turns it off."""

"""Servers, a clock and faults for tests, and a pytest plugin with fixtures for them (`rmqkit.testing.plugin`).

A name is imported at its first use, because pytest imports this package when pytest starts.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rmqkit.testing.chaos import Chaos as Chaos
    from rmqkit.testing.clock import StandingClock as StandingClock
    from rmqkit.testing.clock import VirtualClock as VirtualClock
    from rmqkit.testing.cluster import LocalBroker as LocalBroker
    from rmqkit.testing.cluster import LocalCluster as LocalCluster
    from rmqkit.testing.console import local_console as local_console

__all__ = ["Chaos", "LocalBroker", "LocalCluster", "StandingClock", "VirtualClock", "local_console"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'rmqkit.testing' has no attribute {name!r}")
    home = (
        "console"
        if name == "local_console"
        else "cluster"
        if name.startswith("Local")
        else "chaos"
        if name == "Chaos"
        else "clock"
    )
    return getattr(importlib.import_module(f"rmqkit.testing.{home}"), name)

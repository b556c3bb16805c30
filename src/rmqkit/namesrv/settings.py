"""Settings of the name server (``namesrv.conf``). Source: behaviour.md §1.1."""

from __future__ import annotations

from typing import Annotated

from msgspec import Struct

from rmqkit.settings import Setting

__all__ = ["NamesrvSettings"]


class NamesrvSettings(Struct, kw_only=True):
    """What a ``namesrv.conf`` may say."""

    listen_port: Annotated[int, Setting("listenPort", "port to listen on, 0 for a free one", low=0, high=65535)] = 9876
    bind_address: Annotated[str, Setting("bindAddress", "address to listen on")] = "0.0.0.0"
    scan_interval_ms: Annotated[
        int, Setting("scanNotActiveBrokerInterval", "ms between two looks for silent brokers", low=100)
    ] = 5000

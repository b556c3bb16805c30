"""One call of the service, whatever carries it. Source: grpc.md §2.1, §16.2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

__all__ = ["Call", "CallEnded"]


class CallEnded(Exception):
    """Nothing can be written any more: the caller is gone, or its time is over."""


class Call(Protocol):
    """What an RPC may know of its call."""

    @property
    def metadata(self) -> Mapping[str, str]:
        """What SDKs say with each call: ``x-mq-client-id`` and the like, keys in lower case."""

    @property
    def peername(self) -> tuple[str, int]:
        """Address and port of the other side."""

    def seconds_left(self) -> float | None:
        """Until the caller's deadline; None without one."""

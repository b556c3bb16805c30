"""One call of the service, whatever carries it. Source: grpc.md §2.1, §16.2."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from rmqkit.protocol.command import Command
from rmqkit.proxy.status import Code
from rmqkit.remoting.local import Answered

__all__ = ["AnswerWith", "Call", "CallEnded"]

AnswerWith = Callable[[Callable[[Command], tuple[Code, bytes]]], Answered]
"""Has a call answered with what is made of a broker's answer: a status, and the encoded message that tells it."""


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

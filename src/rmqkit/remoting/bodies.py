"""JSON bodies of requests, read on the loop as far as that is quick.

=======================  ===================  =======================================================================
body                     largest on the loop  what comes so
=======================  ===================  =======================================================================
strict JSON of the type  1 MiB                nearly all: heartbeats, locks, lists of topics and groups
anything else            16 KiB               Java's dialect, enums as numbers: read by Python, 2 µs for each byte
=======================  ===================  =======================================================================

What is longer is refused, and so is a body with more than `OBJECTS_MAX` objects: small ones cost as much as large ones.
Where honest peers write longer bodies in the dialect, as for static topics, the handler has them read in a thread
(`decode_aside`); the name server does so with registrations. Loop only.
"""

from __future__ import annotations

import asyncio
from typing import TypeVar

from rmqkit.errors import BodyError
from rmqkit.protocol.command import Command
from rmqkit.protocol.fastjson import decode_as

T = TypeVar("T")

STRICT_BYTES_MAX = 1 << 20
OBJECTS_MAX = 24_000
_SURELY_FEW_BYTES = 64 << 10
SLOW_BYTES_MAX = 16 << 10
ASIDE_BYTES_MAX = 1 << 20
"""Bytes that a thread reads of one body: a static topic of some 5,000 queues."""


def decode_body(command: Command, body_type: type[T]) -> T:
    """The body of a request as a value.
    Raises BodyError: it is not of the type, or longer than what the loop reads."""
    body = command.payload
    if len(body) > STRICT_BYTES_MAX:
        raise BodyError(f"the body has {len(body)} bytes: {STRICT_BYTES_MAX} are read of request {command.code}")
    if len(body) > _SURELY_FEW_BYTES and (count := body.count(b"{")) > OBJECTS_MAX:
        raise BodyError(f"the body has {count} objects: {OBJECTS_MAX} are read of request {command.code}")
    return decode_as(body, body_type, slow_bytes_max=SLOW_BYTES_MAX)


async def decode_aside(command: Command, body_type: type[T]) -> T:
    """`decode_body` in a thread, for bodies that honest peers write in the dialect.
    Raises BodyError: it is not of the type, or longer than what is read."""
    body = command.payload
    if len(body) > ASIDE_BYTES_MAX:
        raise BodyError(f"the body has {len(body)} bytes: {ASIDE_BYTES_MAX} are read of request {command.code}")
    return await asyncio.to_thread(decode_as, body, body_type)

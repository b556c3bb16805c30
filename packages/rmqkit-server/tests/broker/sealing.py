"""Segments of an archive that a thread of the tests writes.

A broker starts a process for each segment, which imports pyarrow, and with it pandas where this is installed: one to
three seconds of CPU for a segment of some KiB. Tests that need an archive, but not that process, write segments here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import msgspec

from rmqkit.broker.archive import LogArchive
from rmqkit.store.archive.places import place_of
from rmqkit.store.archive.seal import Sealed, Work, work_on

__all__ = ["sealed_in_a_thread"]


@contextmanager
def sealed_in_a_thread() -> Iterator[None]:
    """Let every `LogArchive` write its segments in a thread."""
    with mock.patch.object(LogArchive, "_writing", _write):
        yield


async def _write(archive: LogArchive, line: bytes) -> bytes:
    work = msgspec.json.decode(line, type=Work)
    try:
        sealed = await asyncio.to_thread(work_on, work, place_of(work.archive, work.below))
    except OSError as error:
        sealed = Sealed(error=str(error))
    return msgspec.json.encode(sealed)

"""The process that plans reads of topics for the reader in Java: ``python -m rmqkit.spark.planner``.

``jvm/Planner.java`` starts it on the driver. Each line of the input is a request, a JSON list with the name of a call
and its arguments. Each line of the output is the answer to it, ``{"value": ...}`` or ``{"error": ...}``. The error is
the class and the text of an exception, which `rmqkit.spark.failures` finds in the text of Java's exception. The process
exits at the end of the input. It plans one read of topics at a time: ``open`` begins the next one.

======================================  ==============================================================================
call                                    value
======================================  ==============================================================================
open options, schema, is stream         nothing. The schema is Spark's JSON, null if this package chose the columns
batch                                   the parts of a batch
initialOffset                           the start of a query
rowsMax                                 the limit of a batch, 0 for all messages
endNow                                  nothing. It fixes the end of the query
latestOffset start, rows                the end of the next batch
knownLatest                             the current ends of the queues, or null
parts start, end                        the parts of a batch of a stream
commit end                              nothing
indexed options                         the records of a store that an index points at, each with the path and the base
                                        of its file, and its positions there; null if the source in Python must read
======================================  ==============================================================================

Offsets are texts: Spark compares and stores them as the JSON that this process wrote. `rmqkit.spark.planning` has the
rules.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable
from typing import Any, BinaryIO

from rmqkit.errors import RmqError, SettingsError
from rmqkit.spark.failures import CHECKPOINT_REMEDY
from rmqkit.spark.planning import FORMAT, Part, StreamPlanner, live_options, stream_options


class Session:
    """The reads of a process, one after the other."""

    def __init__(self) -> None:
        self._planner: StreamPlanner | None = None
        self._calls: dict[str, Callable[..., Any]] = {
            "open": self._open,
            "batch": lambda: _plain(self._open_one.batch()),
            "initialOffset": lambda: json.dumps(self._open_one.initial_offset()),
            "rowsMax": lambda: self._open_one.rows_max(),
            "endNow": lambda: self._open_one.end_now(),
            "latestOffset": lambda start, rows: json.dumps(
                self._open_one.latest_offset(None if start is None else _offsets(start), rows)
            ),
            "knownLatest": self._known_latest,
            "parts": lambda start, end: _plain(self._open_one.parts(_offsets(start), _offsets(end))),
            "commit": lambda end: self._open_one.commit(_offsets(end)),
            "indexed": _indexed,
        }

    def answer(self, line: bytes) -> bytes:
        """Return the answer to a request."""
        name, *arguments = json.loads(line)
        try:
            answer = {"value": self._calls[name](*arguments)}
        except RmqError as error:
            answer = {"error": "".join(traceback.format_exception_only(error)).strip()}
        except Exception:  # noqa: BLE001 - the process serves the next request
            answer = {"error": traceback.format_exc()}
        return json.dumps(answer).encode() + b"\n"

    @property
    def _open_one(self) -> StreamPlanner:
        assert self._planner is not None, "a read is opened before it is planned"
        return self._planner

    def _open(self, given: dict[str, str], schema: str | None, is_stream: bool) -> None:
        if schema is not None:
            given = _checked(given, schema)
        self._planner = StreamPlanner(stream_options(given) if is_stream else live_options(given))

    def _known_latest(self) -> str | None:
        known = self._open_one.known_latest()
        return None if known is None else json.dumps(known)


def _checked(given: dict[str, str], schema: str) -> dict[str, str]:
    """Check the columns of the caller or a catalog. Return the options, which a catalog stores with the columns."""
    # Imported here: most reads have the columns of this package, and PySpark and Arrow start slowly.
    from pyspark.sql.types import StructType

    from rmqkit.spark.schema import given_options
    from rmqkit.spark.source.broker import checked_names

    columns = StructType.fromJson(json.loads(schema))
    options = given_options(given, columns)
    checked_names(options, columns)
    return options


def _indexed(given: dict[str, str]) -> list[tuple[str, int, int, int]] | None:
    """Return the records of the wanted keys, or None: the source in Python reports mistakes and damage."""
    # Imported here: reads of topics need none of it, and Arrow starts slowly.
    from rmqkit.arrow.fs import find_segments, map_records, resolve
    from rmqkit.arrow.queue_files import key_reads
    from rmqkit.spark.options import StoreOptions, parse_options, words
    from rmqkit.store.log import scan

    found: list[tuple[str, int, int, int]] = []
    try:
        options = parse_options(StoreOptions, given, "rocketmq-store")
        root = resolve(options.path)
        segments = find_segments(root, words(options.log_paths))
        for topic in sorted(set(options.topic_names)):
            for reads in key_reads(root, segments, options.index_slot_count, topic, words(options.keys)):
                path, base = reads.segment.path, reads.segment.base_offset
                positions = [offset - base for offset in reads.offsets]
                for records in scan.pick(map_records(path, positions), base, positions):
                    if isinstance(records, scan.Damage):
                        return None
                    for low, size in zip(records.positions.tolist(), records.sizes.tolist(), strict=True):
                        found.append((path, base, low, low + size))
    except RmqError:
        return None
    return found


def _plain(parts: Iterable[Part]) -> list[dict[str, Any]]:
    return [part.plain() for part in parts]


def _offsets(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise SettingsError(
            f"{FORMAT}: the checkpoint has unusable offsets, no JSON: {error}; {CHECKPOINT_REMEDY}"
        ) from None


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer requests until their end."""
    session = Session()
    for line in requests:
        answers.write(session.answer(line))
        answers.flush()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the driver, whose exit closes the input
    with os.fdopen(os.dup(1), "wb") as own:
        os.dup2(2, 1)  # other output must not mix with the answers
        serve(sys.stdin.buffer, own)

"""The enumerated options of a read of a store; Spark's format has the same values."""

from __future__ import annotations

import enum


class OffsetsFrom(enum.Enum):
    """The way to find messages: a walk over the log, or the consume queues."""

    WALK = "walk"
    CONSUME_QUEUE = "consumequeue"


class IncludeProperties(enum.Enum):
    """The forms of the properties column."""

    MAP = "map"
    STRING = "string"
    NONE = "none"


class VerifyCrc(enum.Enum):
    """The treatment of a message with a stored body that does not match its CRC."""

    NONE = "none"
    FAIL = "fail"
    DROP = "drop"
    COLUMN = "column"


class CorruptRecords(enum.Enum):
    """The treatment of bytes that are not a record, and of bodies that cannot be unpacked."""

    FAIL = "fail"
    SKIP = "skip"
    REPORT = "report"

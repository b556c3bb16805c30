"""What a read of a store can be asked to do, by name: the values of options here and of Spark's format."""

from __future__ import annotations

import enum


class OffsetsFrom(enum.Enum):
    """How messages are found: by a walk over the log, or by the consume queues."""

    WALK = "walk"
    CONSUME_QUEUE = "consumequeue"


class IncludeProperties(enum.Enum):
    """The forms of the properties column."""

    MAP = "map"
    STRING = "string"
    NONE = "none"


class VerifyCrc(enum.Enum):
    """What happens to a message whose stored body does not match its CRC."""

    NONE = "none"
    FAIL = "fail"
    DROP = "drop"
    COLUMN = "column"


class CorruptRecords(enum.Enum):
    """What happens to bytes that are not a record, and to bodies that cannot be unpacked."""

    FAIL = "fail"
    SKIP = "skip"
    REPORT = "report"

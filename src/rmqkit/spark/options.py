"""Options of the Spark formats: typed, case-insensitive, and every mistake named.

Each format declares its options once, as a settings type (`rmqkit.settings`)::

    batch_rows: Annotated[int, Setting("batchRows", low=1, help="...")] = 8192

Spark hands options over as texts under lower-cased names. Sizes may carry a suffix: ``128m``. Source: spark.md §8.
"""

from __future__ import annotations

import difflib
import enum
import re
from collections.abc import Mapping
from typing import Annotated, TypeVar

import msgspec

from rmqkit.errors import SettingsError
from rmqkit.settings import Setting, load, setting_table
from rmqkit.store.scan import BATCH_ROWS

__all__ = [
    "CorruptRecords",
    "Entity",
    "IncludeProperties",
    "OffsetsFrom",
    "StoreOptions",
    "VerifyCrc",
    "parse_options",
    "words",
]


class Entity(enum.Enum):
    """What the rows of a store are."""

    MESSAGES = "messages"
    CONSUME_QUEUE = "consumequeue"
    INDEX = "index"
    RAW = "commitlog-raw"
    TOPICS = "topics"
    OFFSETS = "offsets"
    DELAY = "delay"
    TRANSACTIONS = "transactions"


class OffsetsFrom(enum.Enum):
    """How messages are found."""

    WALK = "walk"
    CONSUME_QUEUE = "consumequeue"


class IncludeProperties(enum.Enum):
    """How the properties column looks."""

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


class StoreOptions(msgspec.Struct, frozen=True):
    """The options of ``spark.read.format("rocketmq-store")``."""

    path: Annotated[str, Setting("path", help="the store directory of a broker (storePathRootDir)")] = ""
    log_paths: Annotated[
        str, Setting("storePathCommitLog", help="commit log directories, separated by commas, if not path/commitlog")
    ] = ""
    entity: Annotated[Entity, Setting("entity", help="what a row is")] = Entity.MESSAGES
    topics: Annotated[str, Setting("topic", help="read only these topics, separated by commas")] = ""
    columns: Annotated[str, Setting("columns", help="read only these columns, separated by commas")] = ""
    include_body: Annotated[bool, Setting("includeBody", help="whether there is a body column")] = True
    include_properties: Annotated[
        IncludeProperties, Setting("includeProperties", help="properties as a map, as stored, or no such column")
    ] = IncludeProperties.MAP
    split_bytes: Annotated[int, Setting("splitBytes", low=1, help="log file bytes that one task reads")] = 128 << 20
    batch_rows: Annotated[int, Setting("batchRows", low=1, high=1 << 20, help="records decoded at once")] = BATCH_ROWS
    verify_crc: Annotated[VerifyCrc, Setting("verifyCrc", help="what a wrong CRC leads to")] = VerifyCrc.NONE
    corrupt_records: Annotated[
        CorruptRecords, Setting("corruptRecordMode", help="what to do about damaged records")
    ] = CorruptRecords.FAIL
    decompress: Annotated[bool, Setting("decompress", help="bodies as they were sent, or as they are stored")] = True
    unwrap: Annotated[bool, Setting("unwrap", help="one row per member of an inner batch, or per record")] = True
    broker_name: Annotated[str, Setting("brokerName", help="value of the brokerName column")] = ""
    offsets_from: Annotated[
        OffsetsFrom,
        Setting("offsetsFrom", help="walk the log, or read only what the consume queues of the wanted topics point at"),
    ] = OffsetsFrom.WALK
    keys: Annotated[
        str, Setting("key", help="only messages with one of these keys or unique keys; needs topic, uses the index")
    ] = ""
    index_slot_count: Annotated[
        int, Setting("maxHashSlotNum", low=1, help="slots of an index file, as the broker was configured")
    ] = 5_000_000
    filter_pushdown: Annotated[
        bool, Setting("filterPushdown", help="filter in the reader; needs spark.sql.python.filterPushdown.enabled=true")
    ] = False

    @property
    def topic_names(self) -> list[str]:
        """The wanted topics; none means all."""
        return words(self.topics)


OptionsType = TypeVar("OptionsType", bound=msgspec.Struct)

_SIZE = re.compile(r"(\d+)\s*([kmg])b?", re.IGNORECASE)
_SHIFTS = {"k": 10, "m": 20, "g": 30}


def parse_options(options_type: type[OptionsType], given: Mapping[str, str], source: str) -> OptionsType:
    """The options of a format, ``source``, from what Spark was given: name in any case → text.
    Raises SettingsError: an option is unknown (the nearest known one is named), or a value cannot be used."""
    table = setting_table(options_type)
    spelled = {name.lower(): name for name in table}
    texts: dict[str, str] = {}
    for key, text in given.items():
        name = spelled.get(key.lower())
        if name is None:
            near = difflib.get_close_matches(key.lower(), spelled, n=1)
            hint = f"did you mean {spelled[near[0]]}?" if near else f"choose from {', '.join(table)}"
            raise SettingsError(f"{source}: option {key!r} is not known: {hint}")
        texts[name] = _normalised(str(text).strip(), table[name][1])
    options: OptionsType = load([options_type], texts, source=source).values[0]
    return options


def words(text: str) -> list[str]:
    """The parts of a comma-separated list."""
    return [word.strip() for word in text.split(",") if word.strip()]


def _normalised(text: str, value_type: object) -> str:
    if value_type is int and (size := _SIZE.fullmatch(text)):
        return str(int(size[1]) << _SHIFTS[size[2].lower()])
    return text.lower() if isinstance(value_type, type) and issubclass(value_type, enum.Enum) else text

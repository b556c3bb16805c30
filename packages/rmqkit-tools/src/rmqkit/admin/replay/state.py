"""The files of a replay: the state with the next offsets, and the audit with a line for each message."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from rmqkit.admin.replay.memory import TaskFile, new_id, refuse_device
from rmqkit.admin.replay.sources import Lanes, StoreSource, TopicSource
from rmqkit.errors import SettingsError
from rmqkit.sentences import _, plain
from rmqkit.store.files import naming

_AUDIT_TAIL_BYTES = 1 << 20
_AUDIT_BEGIN = b'{"time":'


class State(TaskFile, kw_only=True):
    """The progress of a replay.

    Attributes:
        lanes: the next offset and the end of each lane.
    """

    kind = _("the state of a replay")
    lanes: Lanes
    sent: int = 0
    failed: int = 0
    is_done: bool = False

    @property
    def left(self) -> int:
        """The number of messages of a topic that the replay has not examined yet."""
        return 0 if self.is_done else sum(end - offset for offset, end in self.lanes.values())

    @classmethod
    async def begin(cls, task: str, source: TopicSource | StoreSource) -> State:
        """Return the state at the start of a replay."""
        return cls(task=task, replay_id=new_id(), lanes=await source.lanes())


class Audit:
    """A file with a JSON line for each replayed message. The incomplete last line of a killed run is removed.
    Raises SettingsError: the file is not an audit. Raises OSError: the file cannot be written."""

    def __init__(self, path: Path) -> None:
        refuse_device(path)
        self._path = path
        self._file = open(path, "ab+")  # noqa: SIM115 - closed by `close`
        size = self._file.seek(0, os.SEEK_END)
        tail_at = self._file.seek(max(0, size - _AUDIT_TAIL_BYTES))
        whole, newline, torn = self._file.read().rpartition(b"\n")
        self._latest = whole + newline
        for line in (whole.rpartition(b"\n")[2], torn):
            if not _AUDIT_BEGIN.startswith(line[: len(_AUDIT_BEGIN)]):
                self._file.close()
                raise SettingsError(_("{path} does not end with a line of an audit: name another file", path=path))
        self._file.truncate(tail_at + len(self._latest))

    def write(self, lines: Sequence[dict[str, Any]], *, may_have: bool) -> None:
        """Append lines. ``may_have``: skip the lines that are already at the end of the file."""
        with naming(self._path):
            for line in lines:
                if not (may_have and f'"{line["newMsgId"]}"'.encode() in self._latest):
                    self._file.write(msgspec.json.encode(line, enc_hook=plain) + b"\n")
            self._file.flush()

    def close(self) -> None:
        with naming(self._path):
            self._file.close()

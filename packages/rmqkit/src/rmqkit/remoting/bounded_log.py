"""A log for lines that peers cause. It writes at most one line a minute for each source, so that no peer can fill the
disk.

The first line of a source is written immediately. Further lines within a minute are counted, and the next line reports
their number. The table holds `_SOURCES_MAX` sources. While the table is full, all further sources share one entry.
"""

from __future__ import annotations

import logging

_INTERVAL_MS = 60_000
_SOURCES_MAX = 1024
_OTHERS = ""


class BoundedLog:
    """A log that writes at most one line a minute for each source. Use it only on the event loop."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._written: dict[str, tuple[float, int]] = {}
        """The monotonic time of the last line and the number of lines left out since then, by source, oldest first."""

    def write(self, level: int, source: str, line: str, now_ms: float) -> None:
        """Write a line that a source caused, or only count the line if the last one is less than a minute old.

        Args:
            level: the level of `logging`.
            source: the peer's address without the port, because each connection has another port.
            now_ms: the monotonic time.
        """
        if source not in self._written and len(self._written) >= _SOURCES_MAX:
            self._drop_old(now_ms)
            if len(self._written) >= _SOURCES_MAX:
                source = _OTHERS
        written_ms, left_out = self._written.get(source, (now_ms - _INTERVAL_MS, 0))
        if now_ms - written_ms < _INTERVAL_MS:
            self._written[source] = (written_ms, left_out + 1)
            return
        self._written.pop(source, None)  # so that the dictionary stays ordered by time
        self._written[source] = (now_ms, 0)
        whose = f"from {source}" if source else "from other sources"
        self._log.log(level, "%s", f"{line} ({left_out} like it {whose} left out)" if left_out else line)

    def _drop_old(self, now_ms: float) -> None:
        for source, (written_ms, _) in list(self._written.items()):
            if now_ms - written_ms < _INTERVAL_MS:
                break
            del self._written[source]

"""The store of a broker: the files of its log, the next deletion by retention, and the time at which its disk is full.

=================  =================================================================================================
figure             source
=================  =================================================================================================
segments           ``commitLogMinOffset``, ``commitLogMaxOffset`` and ``mappedFileSizeCommitLog``,
                   without a file that is allocated ahead and still empty
disk               ``commitLogDirCapacity``, which has four digits at most, and ``commitLogDiskRatio``. The
                   capacity includes the part of the disk that is reserved for root; the ratio does not (`usable`)
bytes per second   messages stored per second over 10 min × ``putMessageAverageSize``
expiry             the store time of the oldest message + ``fileReservedTime``. The file is deleted later: its last
                   message may be younger, and deletions run at an hour of ``deleteWhen``
limits             ``diskMaxUsedSpaceRatio``, ``diskSpaceCleanForciblyRatio``, ``diskSpaceWarningLevelRatio``, or
                   Apache's defaults if a broker does not report them
=================  =================================================================================================

`forecast` fits a line to the used share of a disk over time. The error of the slope becomes ``margin_ms``. The slope
includes the deletions by retention. Everything except `Stores` is pure. Source: store.md §9, §12.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Mapping, Sequence

from msgspec import Struct, field

from rmqkit.admin.calls import AdminCalls
from rmqkit.errors import RmqError
from rmqkit.protocol.codes import RequestCode
from rmqkit.sentences import _

__all__ = ["Forecast", "Limit", "Segment", "Store", "Stores", "by_rate", "forecast", "segments", "store_of", "usable"]

SEGMENTS_MAX = 1_000
_LIMITS = {
    "diskMaxUsedSpaceRatio": (75, _("expired files are deleted at any hour")),
    "diskSpaceCleanForciblyRatio": (85, _("files are deleted whatever their age")),
    "diskSpaceWarningLevelRatio": (90, _("messages are refused")),
}
_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40, "PiB": 1 << 50, "EiB": 1 << 60}
_CAPACITY = re.compile(r"Total : ([\d.]+) ?([KMGTPE]?i?B), Free : ([\d.]+) ?([KMGTPE]?i?B)")
_HOUR_MS = 3_600_000
_YEARS_MS = 10 * 365 * 24 * _HOUR_MS
_POINTS_MIN = 6
_STEP = 0.01
"""Brokers report the used share of a disk in whole percent, rounded up."""


class Segment(Struct, rename="camel", kw_only=True):
    """One file of the log: its name, and the number of its bytes that are written and not deleted."""

    name: str
    bytes: int


class Limit(Struct, rename="camel", kw_only=True):
    """A used share of the disk (0 to 1) and the action of the broker above this share."""

    setting: str
    ratio: float
    then: str


class Forecast(Struct, rename="camel", kw_only=True):
    """The time at which a disk reaches a share, calculated from its growth until now.

    Attributes:
        ratio: the share (0 to 1).
        per_hour: the share of the disk that is filled in an hour.
        at_ms: the time at which the disk reaches the share.
        margin_ms: the possible error of ``at_ms``; it is larger if the line fits badly.
    """

    ratio: float
    per_hour: float
    at_ms: int
    margin_ms: int = 0


class Store(Struct, rename="camel", kw_only=True):
    """The store of one broker; None means that the broker does not report the value.

    Attributes:
        segments: the files of the log, the oldest first, at most `SEGMENTS_MAX` of ``segment_count``.
        expires_ms: the earliest time at which the oldest file expires.
        put_bytes: the bytes stored per second, averaged over ten minutes.
        disk_bytes, free_bytes: the size of the disk without the part reserved for root, and its free bytes.
        full: the forecast for the limit above which the broker refuses messages. It assumes the rate ``put_bytes``, no
            deletions, and no other data on the disk.
    """

    broker: str
    address: str
    min_offset: int | None = None
    max_offset: int | None = None
    segment_bytes: int | None = None
    segment_count: int | None = None
    segments: list[Segment] = field(default_factory=list)
    oldest_ms: int | None = None
    reserved_ms: int | None = None
    delete_when: str = ""
    expires_ms: int | None = None
    disk_bytes: int | None = None
    free_bytes: int | None = None
    disk_ratio: float | None = None
    put_bytes: float | None = None
    limits: list[Limit] = field(default_factory=list)
    full: Forecast | None = None
    trouble: str = ""


def segments(min_offset: int, max_offset: int, segment_bytes: int) -> list[Segment]:
    """Return the files of a log that have bytes between two physical offsets."""
    first = min_offset - min_offset % segment_bytes
    return [
        Segment(name=f"{start:020}", bytes=min(max_offset, start + segment_bytes) - max(min_offset, start))
        for start in range(first, max_offset, segment_bytes)
    ]


def store_of(broker: str, address: str, figures: Mapping[str, str], config: Mapping[str, str], now_ms: int) -> Store:
    """Return the store of a broker, calculated from its figures and settings."""
    found = Store(broker=broker, address=address, delete_when=config.get("deleteWhen", ""))
    low, high = _number(figures.get("commitLogMinOffset")), _number(figures.get("commitLogMaxOffset"))
    found.min_offset, found.max_offset = low, high
    found.segment_bytes = size = _number(config.get("mappedFileSizeCommitLog"))
    if low is not None and high is not None and size and 0 <= low <= high:
        found.segment_count = -(-high // size) - low // size if high > low else 0
        begin = max(low, (high // size - SEGMENTS_MAX + 1) * size)
        found.segments = segments(begin, high, size)
    oldest = _number(figures.get("earliestMessageTimeStamp"))
    found.oldest_ms = oldest if oldest and oldest > 0 else None
    if (hours := _number(config.get("fileReservedTime"))) is not None:
        found.reserved_ms = hours * _HOUR_MS
        found.expires_ms = None if found.oldest_ms is None else found.oldest_ms + found.reserved_ms
    if (match := _CAPACITY.search(figures.get("commitLogDirCapacity", ""))) is not None:
        total, total_unit, free, free_unit = match.groups()
        found.disk_bytes = int(float(total) * _UNITS.get(total_unit, 1))
        found.free_bytes = int(float(free) * _UNITS.get(free_unit, 1))
    found.disk_ratio = _float(figures.get("commitLogDiskRatio"))
    if found.disk_bytes is not None and found.free_bytes is not None:
        found.disk_bytes, found.free_bytes = usable(found.disk_bytes, found.free_bytes, found.disk_ratio)
    rates = [_float(one) for one in figures.get("putTps", "").split()]
    size_mean = _float(figures.get("putMessageAverageSize"))
    if rates and rates[-1] is not None and size_mean is not None:
        found.put_bytes = rates[-1] * size_mean
    for setting, (default, then) in _LIMITS.items():
        percent = _number(config.get(setting))
        found.limits.append(Limit(setting=setting, ratio=(default if percent is None else percent) / 100, then=then))
    found.full = by_rate(found, found.limits[-1].ratio, now_ms)
    return found


def usable(total: int, free: int, ratio: float | None) -> tuple[int, int]:
    """Return the size of a disk and its free bytes, without the part that is reserved for root. ``total`` and ``free``
    include this part, but ``ratio`` (the used share) does not. If the ratio is missing or cannot be true, return
    ``total`` and ``free``."""
    used = total - free
    size = int(used / ratio) if ratio and 0 < ratio <= 1 else total
    # The ratio is rounded to whole percent: ignore a size that cannot be true.
    return (size, size - used) if used < size < total else (total, free)


def by_rate(store: Store, ratio: float, now_ms: int) -> Forecast | None:
    """Return a forecast from the current rate, without deletions. None: the disk does not fill within ten years, has
    reached the share already, or the broker does not report the figures."""
    if not store.put_bytes or not store.disk_bytes or store.free_bytes is None:
        return None
    left = store.free_bytes - (1 - ratio) * store.disk_bytes
    ms = left / store.put_bytes * 1000
    if left <= 0 or ms > _YEARS_MS:
        return None
    return Forecast(ratio=ratio, per_hour=store.put_bytes * 3600 / store.disk_bytes, at_ms=now_ms + int(ms))


def forecast(points: Sequence[tuple[int, float | None]], ratio: float, now_ms: int) -> Forecast | None:
    """Return a forecast from the line of least squares through past points (ms, used share). None: there are too few
    points, or the disk does not fill within ten years, or has reached the share already."""
    known = [(at, value) for at, value in points if value is not None]
    if len(known) < _POINTS_MIN:
        return None
    count = len(known)
    mean_ms = sum(at for at, __ in known) / count
    mean = sum(value for __, value in known) / count
    spread = sum((at - mean_ms) ** 2 for at, __ in known)
    if not spread:
        return None
    slope = sum((at - mean_ms) * (value - mean) for at, value in known) / spread
    if all(abs(value / _STEP - round(value / _STEP)) < 1e-6 for __, value in known):
        mean -= _STEP / 2  # whole percent are rounded up, on average by half a percent
    misfit = sum((value - mean - slope * (at - mean_ms)) ** 2 for at, value in known) / max(1, count - 2)
    # Neighbouring values have the same rounding error, so the misfit alone would be too small.
    error = max(math.sqrt(misfit / spread), _STEP / 4 / (known[-1][0] - known[0][0]))
    left = ratio - mean - slope * (now_ms - mean_ms)
    if slope <= 2 * error or left <= 0 or left / slope > _YEARS_MS:
        return None
    ms = left / slope
    return Forecast(
        ratio=ratio, per_hour=slope * _HOUR_MS, at_ms=now_ms + int(ms), margin_ms=int(2 * ms * error / slope)
    )


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.lstrip("-").isdecimal() and len(text) < 20 else None


def _float(text: str | None) -> float | None:
    try:
        found = float(text or "")
    except ValueError:
        return None
    return found if math.isfinite(found) else None


class Stores:
    """Operations on the stores of brokers."""

    def __init__(self, calls: AdminCalls) -> None:
        self._calls = calls

    async def reserved_ms(self, topic: str) -> int | None:
        """Return the shortest retention time at the masters of a topic; None if a master does not report it."""
        masters = await self._calls.masters_of_topic(topic)
        code = RequestCode.GET_BROKER_CONFIG
        configs = await self._calls.fan_out(
            masters.values(), lambda address: self._calls.fetch_properties(address, code)
        )
        hours = [one.get("fileReservedTime", "") for one in configs.values()]
        return min(map(int, hours)) * _HOUR_MS if hours and all(map(str.isdecimal, hours)) else None

    async def of(self, broker: str | None = None, cluster: str | None = None) -> list[Store]:
        """Return the stores of masters, with two requests to each. ``trouble`` is the error of a failed request."""
        masters = await self._calls.targets(broker, cluster)
        return list(await asyncio.gather(*(self._of(name, address) for name, address in masters.items())))

    async def _of(self, name: str, address: str) -> Store:
        calls = self._calls
        try:
            figures, config = await asyncio.gather(
                calls.runtime_info(address), calls.fetch_properties(address, RequestCode.GET_BROKER_CONFIG)
            )
        except RmqError as error:
            return Store(broker=name, address=address, trouble=str(error))
        return store_of(name, address, figures, config, calls.clock.now_ms())

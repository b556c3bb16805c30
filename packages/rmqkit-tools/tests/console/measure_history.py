"""The history at full size: ``python -m tests.console.measure_history [DAYS] [SERIES] [CHANGING]`` (``make
measure-history``) prints the size of the file, memory, and what writing and reading take.

Each simulated hour fills the blocks of all series as a console would that asks once a minute, and writes once, where a
real one writes twelve times. Minutes come for the last 8 days, as older ones are gone at the end. Series that do not
change keep one value; the others go up and down by hundreds.
"""

from __future__ import annotations

import asyncio
import json
import random
import resource
import sys
import tempfile
import time
from array import array
from pathlib import Path

from rmqkit.console.watch import history
from rmqkit.console.watch.history import DAY_MS, HOUR_MS, History

START = 1_800_000_000_000 - 1_800_000_000_000 % DAY_MS


class At:
    """A clock that stands where it is put."""

    ms = START

    def now_ms(self) -> int:
        return self.ms


def walk(rng: random.Random, slots: int) -> array[int]:
    """A lag that goes up and down."""
    values, value = array("q"), rng.randrange(1_000_000)
    for _ in range(slots):
        value = max(0, value + round(rng.gauss(0, 200)))
        values.append(value)
    return values


async def main(days: int, series: int, changing: int) -> None:
    rng, clock = random.Random(1), At()
    hours, long = [walk(rng, 60) for _ in range(300)], [walk(rng, 96) for _ in range(300)]
    idle = array("q", [5]) * 60
    names = [("lag", f"group-{number}") for number in range(series)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "history"
        kept = History(path, clock)  # type: ignore[arg-type]
        await kept.open()
        _, minutes, quarters = kept.levels
        write_s, largest, began = [], 0, time.process_time()
        for hour in range(days * 24):
            clock.ms = START + hour * HOUR_MS
            for key in names:
                kept._names.add(key)
            if hour % 24 == 23:  # a day is written once, where a real console writes it 288 times
                quarters.end(clock.ms - clock.ms % DAY_MS)
                for number, key in enumerate(names):
                    slots = rng.choice(long) if number < changing else array("q", [5]) * 96
                    quarters.current[key] = array("q", slots)
            if hour >= (days - 8) * 24:
                minutes.end(clock.ms)
                for number, key in enumerate(names):
                    minutes.current[key] = rng.choice(hours) if number < changing else idle
            elif hour % 24 != 23:
                continue
            at = time.process_time()
            await kept.write(clock.ms + 1)
            write_s.append(time.process_time() - at)
            largest = max(largest, sum(one.stat().st_size for one in Path(folder).iterdir()))  # noqa: ASYNC240
        cpu_s = time.process_time() - began
        read_ms = {}
        for label, back in (("24h", DAY_MS), ("7d", 7 * DAY_MS - HOUR_MS), ("90d", 90 * DAY_MS)):
            at = time.perf_counter()
            _, points = await kept.read("lag", "group-3", clock.ms - back, clock.ms)
            read_ms[label] = [round((time.perf_counter() - at) * 1000, 1), len(points)]
        found = await kept.kept()
        kept_days = {
            f"{step // 60_000} min": round((clock.ms - start) / DAY_MS, 1)
            for start, step in await kept._in_thread(kept._oldest)
        }
        await kept.close()
        at = time.perf_counter()
        await (again := History(path, clock)).open()  # type: ignore[arg-type]
        open_s = time.perf_counter() - at
        await again.close()
        print(
            json.dumps(
                {
                    "days": days,
                    "series": series,
                    "changing": changing,
                    "file_mib": round(found.file_bytes / (1 << 20), 1),
                    "largest_with_log_mib": round(largest / (1 << 20), 1),
                    "cap_mib": history.FILE_BYTES_MAX >> 20,
                    "kept_days": kept_days,
                    "write_cpu_s_median": round(sorted(write_s)[len(write_s) // 2], 3),
                    "write_cpu_s_max": round(max(write_s), 3),
                    "read_ms_and_points": read_ms,
                    "open_s": round(open_s, 2),
                    "cpu_s": round(cpu_s, 1),
                    "process_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
                    "trouble": found.trouble,
                }
            )
        )


if __name__ == "__main__":
    numbers = [int(one) for one in sys.argv[1:]]
    asyncio.run(main(*(numbers + [90, 12_000, 12_000][len(numbers) :])))

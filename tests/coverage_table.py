"""``make coverage`` prints which lines and branches tests ran: `rows` adds up the files of each package."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


def rows(report: Mapping[str, Any]) -> Iterator[tuple[str, float, float, int]]:
    """Yield each package, the share of its lines and of its branches that ran in percent, and its lines.
    The last row is for all of them."""
    totals: dict[str, Counter[str]] = {}
    for path, file in report["files"].items():
        package = Path(path).parts[1]
        for name in (package, "in all"):
            totals.setdefault(name, Counter()).update(file["summary"])
    for name, total in sorted(totals.items(), key=lambda row: (row[0] == "in all", row[0])):
        lines, branches = total["num_statements"], total["num_branches"]
        yield (
            name,
            100.0 * total["covered_lines"] / max(1, lines),
            100.0 * total["covered_branches"] / max(1, branches),
            lines,
        )


def main() -> None:
    """Print a table of the report in the file that the command line names."""
    print(f"{'package':16} {'lines %':>8} {'branches %':>11} {'lines':>8}")
    for name, lines, branches, count in rows(json.loads(Path(sys.argv[1]).read_text())):
        print(f"{name:16} {lines:8.1f} {branches:11.1f} {count:8,}")


if __name__ == "__main__":
    main()

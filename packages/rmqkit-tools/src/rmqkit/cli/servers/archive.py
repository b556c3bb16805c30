"""``rmq archive``: check and repair the archive of a broker's log, without a broker."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from rmqkit.cli.frame.printing import print_table
from rmqkit.cli.servers.store import Config, one_line_errors, progress_bar, settings_of
from rmqkit.store.settings import StoreSettings

app = typer.Typer(
    name="archive",
    help="Check and repair the archive of a broker's log (setting archive).",
    no_args_is_help=True,
    add_completion=False,
)
_Place = Annotated[
    str,
    typer.Argument(
        metavar="PLACE",
        help="Folder or address of the archive with the broker's name, such as /mnt/archive/broker-a.",
    ),
]


@app.command()
def verify(
    place: _Place,
    repair_from: Annotated[
        Path | None,
        typer.Option(
            "--repair-from",
            metavar="STORE",
            help="Write damaged and missing segments again from the log of this store directory.",
            show_default=False,
        ),
    ] = None,
    config: Config = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Check every segment: checksums, records, order, gaps, and that all segments belong to one log.

    The exit code is 1 if something is wrong. You can run this command while a broker uses the archive."""
    from rmqkit.store.archive.places import place_at
    from rmqkit.store.archive.verify import repair
    from rmqkit.store.archive.verify import verify as check

    with one_line_errors(), progress_bar("verify") as progress:
        where = place_at(place)
        report = check(where, progress)
        if repair_from is not None:
            report = repair(where, report, repair_from, settings_of(config, repair_from) or StoreSettings())
    if as_json:
        print(json.dumps({"is_sound": report.is_sound, **msgspec.to_builtins(report)}))
    else:
        for name in report.repaired:
            print(f"written again: {name}")
        for problem in report.problems:
            print(problem)
        print(f"{where}: {'sound' if report.is_sound else 'damaged'}")
        print_table(["what", "count"], [(name, getattr(report, name)) for name in ("segments", "records", "bytes")])
    if not report.is_sound:
        raise typer.Exit(1)


@app.command()
def adopt(
    place: _Place, root: Annotated[Path, typer.Argument(metavar="STORE", help="Store directory (storePathRootDir).")]
) -> None:
    """Assign an archive to the log of a store if the broker cannot tell that they match. Stop the broker first."""
    from rmqkit.store.archive.identity import adopt as take
    from rmqkit.store.archive.places import place_at
    from rmqkit.store.archive.verify import found_in

    with one_line_errors():
        where = place_at(place)
        log = take(root, found_in(where))
    print(f"{root} now has log {log}, the same as {where}")

"""``rmq doctor``: print the findings of `rmqkit.admin.diagnosis.doctor`; with ``--shards``, for each shard.

The exit code is 1 if a check fails.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Annotated

import msgspec
import typer

from rmqkit.admin.diagnosis.doctor import CHECKS, OF_EACH_SHARD, OF_PRODUCTION, Finding, State, Target
from rmqkit.cli.frame.printing import columns, wrapped
from rmqkit.cli.servers.shards import check_layout, check_settings, shard_settings
from rmqkit.cli.servers.sources import BROKER, Config, NameServers, Set, Sources, StoreFolder, options_of, store_root
from rmqkit.errors import RmqError
from rmqkit.settings import Configuration, Given

app = typer.Typer(add_completion=False)


class Purpose(StrEnum):
    """The purpose for which a machine is checked."""

    DEVELOPMENT = "development"
    PRODUCTION = "production"


@app.command()
def doctor(
    config: Config = None,
    name_servers: NameServers = None,
    store: StoreFolder = None,
    shards: Annotated[
        int,
        typer.Option(min=0, metavar="N", help="Check the ports and the store of each of N shards.", show_default=False),
    ] = 0,
    purpose: Annotated[
        Purpose | None,
        typer.Option(
            "--for",
            help="development skips the checks for servers: kernel settings, limits, disk and clock. "
            "(default: production with --config or --shards, else development)",
            show_default=False,
        ),
    ] = None,
    set_: Set = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Check whether this machine is ready to run a broker, and show how to fix each problem.

    The exit code is 1 if a check fails."""
    options = options_of(set_, namesrvAddr=name_servers, storePathRootDir=store)
    given, notes = (sources := Sources(BROKER, config, options)).read()
    everything = Configuration.load(BROKER, given, file=sources.file)
    is_development = not (config or shards) if purpose is None else purpose is Purpose.DEVELOPMENT
    target = _target(everything, notes, is_development=is_development)
    checks = CHECKS if is_development else CHECKS + OF_PRODUCTION
    findings = [finding for check in checks for finding in check(target)]
    findings += _shards(everything, given, shards, is_development=is_development)
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(findings)).decode())
    else:
        width = max(len(finding.check) for finding in findings)
        for one in findings:
            first, *rest = wrapped(f"{one.found}{f': {one.remedy}' if one.remedy else ''}", columns() - width - 11)
            print(f"{one.state.value:<7}  {one.check:<{width}}  {first}")
            print(*(f"{'':<{width + 11}}{line}\n" for line in rest), sep="", end="")
        if is_development:
            print("for a server there is more to check: rmq doctor --for production", file=sys.stderr)
    if any(finding.state is State.FAIL for finding in findings):
        raise typer.Exit(1)


def _target(everything: Configuration, notes: list[str], *, is_development: bool) -> Target:
    broker, stored, users, _, _, *tls = everything.settings
    root = store_root(stored)
    return Target(broker, stored, root, users, tls[0], tls[1], notes, is_development=is_development)


def _shards(
    everything: Configuration, given: Mapping[str, Given], count: int, *, is_development: bool
) -> Iterator[Finding]:
    """Check the settings of each shard. Without shards (0), the store of the only broker must not contain shards."""
    texts, root = everything.texts(), store_root(everything.settings[1])
    shards = [shard_settings(texts, index) for index in range(count)]
    try:
        check_layout(root, count or None)
        if shards:
            check_settings([{**texts, **own} for own in shards])
    except RmqError as error:
        yield Finding("shards", State.FAIL, str(error))
        return
    for index, own in enumerate(shards or [{}]):
        name = f"shard-{index} " if shards else ""
        ones = {key: Given(text, name) for key, text in own.items()}
        target = _target(Configuration.load(BROKER, {**given, **ones}), [], is_development=is_development)
        for check in OF_EACH_SHARD:
            yield from (msgspec.structs.replace(one, check=name + one.check) for one in check(target))

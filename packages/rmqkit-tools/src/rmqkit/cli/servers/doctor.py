"""``rmq doctor``: prints what `rmqkit.admin.diagnosis.doctor` finds; with ``--shards`` for each of them.

Exit code 1 when a line says ``fail``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated

import msgspec
import typer

from rmqkit.admin.diagnosis.doctor import CHECKS, OF_EACH_SHARD, Finding, State, Target
from rmqkit.cli.servers.shards import check_layout, check_settings, shard_settings
from rmqkit.cli.servers.sources import BROKER, Config, NameServers, Set, Sources, StoreFolder, options_of, store_root
from rmqkit.errors import RmqError
from rmqkit.settings import Configuration, Given

app = typer.Typer(add_completion=False)


@app.command()
def doctor(
    config: Config = None,
    name_servers: NameServers = None,
    store: StoreFolder = None,
    shards: Annotated[
        int,
        typer.Option(min=0, metavar="N", help="Check the ports and the store of each of N shards.", show_default=False),
    ] = 0,
    set_: Set = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Check whether this machine is ready to run a broker, and say how to fix what is not."""
    options = options_of(set_, namesrvAddr=name_servers, storePathRootDir=store)
    given, notes = (sources := Sources(BROKER, config, options)).read()
    everything = Configuration.load(BROKER, given, file=sources.file)
    target = _target(everything, notes)
    findings = [finding for check in CHECKS for finding in check(target)]
    findings += _shards(everything, given, shards)
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(findings)).decode())
    else:
        width = max(len(finding.check) for finding in findings)
        for one in findings:
            print(f"{one.state.value:<7}  {one.check:<{width}}  {one.found}{f': {one.remedy}' if one.remedy else ''}")
    if any(finding.state is State.FAIL for finding in findings):
        raise typer.Exit(1)


def _target(everything: Configuration, notes: list[str]) -> Target:
    broker, stored, users, _, _, *tls = everything.settings
    return Target(broker, stored, store_root(stored), users, tls[0], tls[1], notes)


def _shards(everything: Configuration, given: Mapping[str, Given], count: int) -> Iterator[Finding]:
    """What is each shard's own; without shards (0) there is one broker, and its store must not hold any."""
    texts, root = everything.texts(), _target(everything, []).root
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
        target = _target(Configuration.load(BROKER, {**given, **ones}), [])
        for check in OF_EACH_SHARD:
            yield from (msgspec.structs.replace(one, check=name + one.check) for one in check(target))

"""What sets one shard of ``rmq broker --shards N`` apart, and where that cannot be: a port or a store of two.

=========================================================  ====================================================
setting                                                    of shard ``i``
=========================================================  ====================================================
brokerName (default: host name)                            ``…-i``
listenPort, haListenPort                                   + 10·i: VIP (-2), own and HA port (+1) never meet;
                                                           0 stays 0: a free one at each start
metricsPromExporterPort                                    + i; 0 stays 0
storePathRootDir, storePathCommitLog, readOnlyCommitLog…   ``…/shard-i``
=========================================================  ====================================================

The number of shards of a store may grow, as new ones begin empty, and not shrink: messages never move.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from rmqkit.cli.sources import Running
from rmqkit.errors import SettingsError, StoreMismatch

_STEPS = {"listenPort": 10, "haListenPort": 10, "metricsPromExporterPort": 1}
_FOLDERS = ("storePathRootDir", "storePathCommitLog", "readOnlyCommitLogStorePaths")
_UNSHARDED = {"commitlog", "config", "consumequeue"}
_FOLDER = re.compile(r"shard-(0|[1-9]\d*)")
_PORT_MAX = 65535
_VIP_BELOW = 2


def shard_settings(texts: Mapping[str, str], index: int) -> dict[str, str]:
    """What sets one shard apart from the settings that all share."""
    ports = {key: str(int(texts[key]) + step * index) for key, step in _STEPS.items() if int(texts[key])}
    folders = {
        key: ",".join(str(Path(folder.strip()) / f"shard-{index}") for folder in texts[key].split(","))
        for key in _FOLDERS
        if texts[key]
    }
    return {"brokerName": f"{texts['brokerName'] or socket.gethostname()}-{index}", **ports, **folders}


def check_settings(shards: Sequence[Mapping[str, str]]) -> None:
    """Refuse shards that, with all their settings, would share a port or a master, or need a port that there is not.
    Raises SettingsError."""
    if address := shards[0]["haMasterAddress"]:
        raise SettingsError(f"haMasterAddress={address} is of one master: leave it out, name servers know each shard's")
    users: dict[int, str] = {}
    for texts in shards:
        for what, port in _ports(texts):
            user = f"{what} of {texts['brokerName']}"
            if port > _PORT_MAX:
                raise SettingsError(f"{user} would be {port}, above {_PORT_MAX}: choose a lower one, or fewer shards")
            if port in users:
                raise SettingsError(f"{user} would be {port}, as is {users[port]}: choose another one of the two")
            users[port] = user


def _ports(texts: Mapping[str, str]) -> Iterator[tuple[str, int]]:
    own, ha, metrics = (int(texts[key]) for key in _STEPS)
    if own:
        yield "listenPort", own
    if own > _VIP_BELOW:
        yield "the VIP port", own - _VIP_BELOW
    if own or ha:
        yield "haListenPort", ha or own + 1
    if metrics and texts["metricsExporterType"] != "DISABLE":
        yield "metricsPromExporterPort", metrics


def check_layout(root: Path, count: int | None) -> None:
    """Refuse a store directory of which some messages would not be served; ``count`` is None for an unsharded broker.
    Raises StoreMismatch."""
    filled = {folder.name for folder in root.glob("*") if any(folder.glob("*"))}
    needed = max((int(name.removeprefix("shard-")) + 1 for name in filled if _FOLDER.fullmatch(name)), default=0)
    remedy = ""
    if count is None and needed:
        remedy = f"holds shards: start it with --shards {needed}"
    elif count is not None and filled & _UNSHARDED:
        remedy = f"is an unsharded broker's, it has {min(filled & _UNSHARDED)}: start it without --shards"
    elif count is not None and needed > count:
        remedy = f"holds shard-{needed - 1}, which --shards {count} would leave unserved: use --shards {needed}"
    if remedy:
        raise StoreMismatch(f"store {root} {remedy}, or choose another directory")


def print_shards(running: Running, shards: Sequence[Mapping[str, str]], *, as_json: bool) -> None:
    """The settings that all share, as a file may have them, and what sets each apart."""
    if as_json:
        rows = [msgspec.to_builtins(row) for row in running.configurations[0].described()]
        rows = [row | {"shards": [own[row["key"]] for own in shards if row["key"] in own]} for row in rows]
        print(msgspec.json.format(msgspec.json.encode(rows)).decode())
        return
    for index, own in enumerate(shards):
        print(f"# shard-{index}: " + "  ".join(f"{key}={text}" for key, text in own.items()))
    running.print(as_json=False)

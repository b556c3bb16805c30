"""The files that some pages assume: they are put into the page's folder before its first block."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from tests.golden_stores import unpack_golden

__all__ = ["GIVEN"]


def _java_store(folder: Path, ports: Mapping[int, int]) -> None:
    """Put a store that a Java broker has written, and its ``broker.conf``, into a folder."""
    conf = unpack_golden("5.4.0", folder).manifest["brokerConf"]
    conf |= {"listenPort": ports[10911], "haListenPort": ports[10912], "namesrvAddr": f"127.0.0.1:{ports[9876]}"}
    (folder / "broker.conf").write_text("".join(f"{key}={value}\n" for key, value in conf.items()))


GIVEN: Mapping[str, Callable[[Path, Mapping[int, int]], None]] = {"docs/how-to/move-from-java.md": _java_store}

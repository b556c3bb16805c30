"""The golden stores: unpacked copies and what the Java client read from them (see golden/README.md)."""

from __future__ import annotations

import gzip
import json
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["GoldenStore", "golden_manifest", "unpack_golden"]

_FOLDER = Path(__file__).parent / "golden"


@dataclass(frozen=True)
class GoldenStore:
    """A copy of a golden store.

    Attributes:
        root: the store directory (``storePathRootDir``).
        manifest: what the Java client saw; ``manifest["brokerConf"]`` has the file sizes.
    """

    root: Path
    manifest: dict[str, Any]


def golden_manifest(name: str) -> dict[str, Any]:
    """The manifest of one store, by the part of its file name (``5.4.0``)."""
    with gzip.open(_FOLDER / f"manifest-{name}.json.gz") as file:
        manifest: dict[str, Any] = json.load(file)
    return manifest


def unpack_golden(name: str, into: Path) -> GoldenStore:
    """Unpack a copy of a store into an empty directory."""
    with tarfile.open(_FOLDER / f"store-{name}.tar.gz") as archive:
        archive.extractall(into, filter="data")
    return GoldenStore(into / "store", golden_manifest(name))

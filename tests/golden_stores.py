"""The golden stores: unpacked copies and what the Java client read from them (see golden/README.md)."""

from __future__ import annotations

import atexit
import functools
import gzip
import json
import shutil
import tarfile
import tempfile
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
    manifest: dict[str, Any] = json.loads(_manifest_text(name))
    return manifest


@functools.cache
def _manifest_text(name: str) -> bytes:
    return gzip.decompress((_FOLDER / f"manifest-{name}.json.gz").read_bytes())


def unpack_golden(name: str, into: Path) -> GoldenStore:
    """Unpack a copy of a store into an empty directory."""
    shutil.copytree(_unpacked(name), into, dirs_exist_ok=True)
    return GoldenStore(into / "store", golden_manifest(name))


@functools.cache
def _unpacked(name: str) -> Path:
    """A store that nobody changes, for copies: unpacking takes ten times as long. It is there while the process is."""
    folder = Path(tempfile.mkdtemp(prefix="rmq-golden-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    with tarfile.open(_FOLDER / f"store-{name}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    return folder

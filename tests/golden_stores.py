"""The golden stores: unpacked copies, and the messages that the Java client read from them (see golden/README.md)."""

from __future__ import annotations

import functools
import gzip
import os
import tarfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

__all__ = ["GoldenStore", "golden_manifest", "unpack_golden"]

_FOLDER = Path(__file__).parent / "golden"
_BLOCK_BYTES = 4096


@dataclass(frozen=True)
class GoldenStore:
    """A copy of a golden store.

    Attributes:
        root: the store directory (``storePathRootDir``).
        manifest: the messages that the Java client read; ``manifest["brokerConf"]`` has the file sizes.
    """

    root: Path
    manifest: dict[str, Any]

    @property
    def conf(self) -> str:
        """Return the lines of the store's ``broker.conf`` without ports, which other tests may use."""
        lines = self.manifest["brokerConf"].items()
        return "".join(f"{key}={value}\n" for key, value in lines if not key.endswith("Port"))


def golden_manifest(name: str) -> dict[str, Any]:
    """Return the manifest of one store, by the version in its file name (``5.4.0``)."""
    manifest: dict[str, Any] = msgspec.json.decode(_manifest_text(name))
    return manifest


@functools.cache
def _manifest_text(name: str) -> bytes:
    return gzip.decompress((_FOLDER / f"manifest-{name}.json.gz").read_bytes())


def unpack_golden(name: str, into: Path) -> GoldenStore:
    """Unpack a copy of a store into an empty or missing directory. Its newest file gets the present time, because
    brokers delete files that are three days old."""
    files = _files(name)
    since = time.time() - max(one.mtime for one in files)
    for one in files:
        path = into / one.path
        if one.parts is None:
            path.mkdir(one.mode, parents=True)
            continue
        with path.open("xb") as file:
            os.fchmod(file.fileno(), one.mode)
            for position, content in one.parts:
                os.pwrite(file.fileno(), content, position)
            file.truncate(one.size)
        os.utime(path, (one.mtime + since, one.mtime + since))
    return GoldenStore(into / "store", golden_manifest(name))


@dataclass(frozen=True)
class _File:
    """A file of an archive without its holes (nine tenths of a store are zeros). A folder has no parts."""

    path: str
    mode: int
    mtime: float
    size: int
    parts: list[tuple[int, bytes]] | None


@functools.cache
def _files(name: str) -> list[_File]:
    with tarfile.open(_FOLDER / f"store-{name}.tar.gz") as archive:
        return [
            _File(one.name, one.mode, one.mtime, one.size, _parts(content.read()) if content else None)
            for one in archive
            for content in [archive.extractfile(one)]
        ]


def _parts(content: bytes) -> list[tuple[int, bytes]]:
    """Return the blocks that are not all zeros, with their positions."""
    blocks = ((at, content[at : at + _BLOCK_BYTES]) for at in range(0, len(content), _BLOCK_BYTES))
    return [(at, block) for at, block in blocks if block.count(0) < len(block)]

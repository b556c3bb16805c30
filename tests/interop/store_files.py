"""Store directories: their files, to compare them, and Apache's broker on one."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.interop.apache import ApachePair, run_apache_broker
from tests.interop.kit import ApacheKit
from tests.interop.standalone import run_name_server

DERIVED_AND_LOG = ("commitlog", "consumequeue", "batchconsumequeue", "index")


def files(root: Path, *folders: str) -> dict[str, bytes]:
    """Return the content of every file below some folders of a store, by path."""
    found = sorted(path for folder in folders for path in (root / folder).rglob("*") if path.is_file())
    return {str(path.relative_to(root)): path.read_bytes() for path in found}


def without_new_blank(after: dict[str, bytes], before: dict[str, bytes]) -> dict[str, bytes]:
    """Return `after` without new files that hold only zeros: a broker creates the next log file ahead."""
    return {path: content for path, content in after.items() if path in before or content.strip(b"\0")}


def log_bytes(root: Path, end: int) -> bytes:
    """Return the log from offset 0 to `end`."""
    return b"".join(files(root, "commitlog").values())[:end]


def has_topic(store: Path, topic: str) -> bool:
    """Return True if the file of topics, which Apache's broker reads, has a topic. A running broker may replace it."""
    with suppress(FileNotFoundError):
        return b'"%b":' % topic.encode() in (store / "config" / "topics.json").read_bytes()
    return False


@contextmanager
def opened_by_apache(kit: ApacheKit, store: Path, work_dir: Path, conf: Mapping[str, object]) -> Iterator[ApachePair]:
    """Run a real broker on a store, as `open_store_with_apache` does, but with our name server, to save a JVM."""
    with (
        run_name_server(work_dir) as (name_server, namesrv_addr),
        run_apache_broker(kit, store, work_dir, namesrv_addr, conf) as (broker, broker_addr),
    ):
        yield ApachePair(kit, name_server, broker, namesrv_addr, broker_addr, store)

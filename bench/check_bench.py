"""The costs of verify, rebuild and recovery of a large store; prints JSON.

    python bench/check_bench.py [--gib 2] [--body-bytes 1024] [--directory /var/tmp] [--index]

Another process fills a store and exits without closing it, as after kill -9. Each case runs in a separate process.
Seconds are CPU and wall seconds, ``gb_s`` and ``records_s`` are per CPU second, ``for_10_gib_s`` is the time of 10 GiB
at that rate. The bytes are in the page cache unless the machine has less memory. Needs 1.2 times the space.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rmqkit.protocol.record import pack_host
from rmqkit.store.message_store import InnerMessage, MessageStore, PutStatus
from rmqkit.store.offline.check import stat, verify
from rmqkit.store.settings import StoreSettings

HOST = pack_host("127.0.0.1", 10911)
QUEUES = 12
PROPERTIES = b"TAGS\x01TagA\x02UNIQ_KEY\x01AC110001%024X\x02CLUSTER\x01DefaultCluster\x02KEYS\x01k%d\x02"


def settings(is_indexed: bool) -> StoreSettings:
    return StoreSettings(message_index_enable=is_indexed, disk_warning_percent=99, disk_clean_forcibly_percent=99)


def fill(root: Path, is_indexed: bool, store_bytes: int, body_bytes: int) -> None:
    store = MessageStore(root, settings(is_indexed))
    store.open()
    body = os.urandom(body_bytes)
    i = 0
    while store.max_physical_offset < store_bytes:
        put = InnerMessage(f"T{i % 3}", i % QUEUES // 3, body, PROPERTIES % (i, i), 0, 0, 1_700_000_000_000, HOST, HOST)
        assert store.put(put).status is PutStatus.OK
        i += 1
    time.sleep(2)  # the queue flush thread writes the checkpoint
    os._exit(0)


def recover(root: Path, is_indexed: bool) -> None:
    store = MessageStore(root, settings(is_indexed))
    store.open()
    os._exit(0)  # the abort file remains


def rebuild_all(root: Path, is_indexed: bool) -> None:
    from rmqkit.store.offline.rebuild import rebuild

    rebuild(root, settings(is_indexed), queues=True, index=is_indexed)


def recover_from_start(root: Path, is_indexed: bool) -> None:
    (root / "checkpoint").unlink(missing_ok=True)
    recover(root, is_indexed)


def recover_from_log(root: Path, is_indexed: bool) -> None:
    shutil.rmtree(root / "consumequeue")
    recover_from_start(root, is_indexed)


CASES: dict[str, Callable[[Path, bool], object]] = {
    "stat": lambda root, is_indexed: stat(root, settings(is_indexed)),
    "verify": lambda root, is_indexed: verify(root, settings(is_indexed)),
    "recovery with checkpoint": recover,
    "recovery without checkpoint": recover_from_start,
    "recovery from the log alone": recover_from_log,
    "rebuild": rebuild_all,
}


def measured(case: str, root: Path, is_indexed: bool, records: int, log_bytes: int) -> dict[str, float]:
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    flags = ["--index"] if is_indexed else []
    subprocess.run([sys.executable, __file__, "--case", case, str(root), *flags], check=True)
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "cpu_s": round(cpu, 2),
        "wall_s": round(wall, 2),
        "gb_s": round(log_bytes / cpu / 1e9, 2),
        "records_s": round(records / cpu),
        "for_10_gib_s": round(cpu / log_bytes * (10 << 30), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--gib", type=float, default=2)
    parser.add_argument("--body-bytes", type=int, default=1024)
    parser.add_argument("--directory", type=Path, default=None)
    parser.add_argument("--index", action="store_true", help="with keys in the index")
    parser.add_argument("--case", nargs=2, metavar=("CASE", "STORE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case is not None and options.case[0] == "fill":
        fill(Path(options.case[1]), options.index, int(options.gib * (1 << 30)), options.body_bytes)
    elif options.case is not None:
        CASES[options.case[0]](Path(options.case[1]), options.index)
    else:
        with tempfile.TemporaryDirectory(dir=options.directory) as folder:
            root = Path(folder, "store")
            arguments = [
                "--gib",
                str(options.gib),
                "--body-bytes",
                str(options.body_bytes),
                "--case",
                "fill",
                str(root),
            ]
            subprocess.run([sys.executable, __file__, *arguments, *["--index"][: int(options.index)]], check=True)
            found = stat(root, settings(options.index))
            about = {"records": found.records, "log_bytes": found.bytes, "is_indexed": options.index}
            print(json.dumps({"about": about}), flush=True)
            for case in CASES:
                figures = measured(case, root, options.index, found.records, found.bytes)
                print(json.dumps({"case": case, **figures}), flush=True)


if __name__ == "__main__":
    main()

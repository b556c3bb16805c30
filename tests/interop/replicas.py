"""Masters and slaves of either maker as processes, and their progress, tables and bytes.

Every slave has its own name server, where its master registers too: a client there sees only the master and this slave.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import Command, decode_fields
from rmqkit.protocol.fastjson import loads
from tests.interop.apache import (
    BROKER_CONF,
    HOST,
    ask,
    is_member,
    log_end,
    run_apache_broker,
)
from tests.interop.kit import ApacheKit
from tests.interop.server_process import ServerProcess, wait_until
from tests.interop.standalone import run_broker
from tests.interop.store_files import files, without_new_blank
from tests.ports import free_ports

BROKER = "replicas"
READY_SECONDS = 150
CAUGHT_UP_SECONDS = 150
OURS_STOP_SECONDS = 150
POLL_SECONDS, TABLES_POLL_SECONDS = 0.2, 1.0  # requests cost CPU time too
QUEUES_MAX = 8
SLAVE_TIMEOUT_SECONDS = 6
"""Twice the default, so that a running slave gets CPU time on a busy machine."""

# Several files of everything, but not hundreds. Two delay levels stay pending, the others expire soon.
CONF: Mapping[str, object] = {
    **BROKER_CONF,
    "brokerName": BROKER,
    "brokerRole": "SYNC_MASTER",
    "inSyncReplicas": 2,
    "slaveTimeout": SLAVE_TIMEOUT_SECONDS * 1000,
    "haHousekeepingInterval": 60_000,
    "mappedFileSizeCommitLog": 8 << 20,
    "mappedFileSizeConsumeQueue": 40_000,
    "maxHashSlotNum": 20_000,
    "maxIndexNum": 40_000,
    "messageDelayLevel": "1s 1s 2s 2s 3s 3s 4s 4s 4s 4s 4s 4s 4s 4s 4s 4s 1h 2h",
    "slaveReadEnable": "true",
}

TABLES = {
    "topics": (RequestCode.GET_ALL_TOPIC_CONFIG, "topicConfigTable"),
    "groups": (RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG, "subscriptionGroupTable"),
    "offsets": (RequestCode.GET_ALL_CONSUMER_OFFSET, "offsetTable"),
    "delays": (RequestCode.GET_ALL_DELAY_OFFSET, "offsetTable"),
}
"""The tables that a slave copies from its master: the request that returns a table, and the part of the answer."""

INDEX_HEADER_BYTES, INDEX_SLOT_BYTES, INDEX_ENTRY_BYTES, INDEX_KEY_BYTES = 40, 4, 20, 12


@dataclass(frozen=True)
class Replica:
    """A running broker; `kit` is None for our broker. `ports`: the broker's and the HA port."""

    kit: ApacheKit | None
    process: ServerProcess
    address: str
    ports: tuple[int, int]
    store: Path

    @property
    def log_end(self) -> int:
        return log_end(self.address)

    def stop(self) -> None:
        """Stop our broker cleanly, but kill Apache's, which needs 15 s to stop."""
        if self.kit is not None:
            self.process.kill()
            return
        exit_code = self.process.stop(signal.SIGTERM, OURS_STOP_SECONDS)
        assert exit_code == 0, f"ended with {exit_code}; {self.process.log_tail()}"
        assert not (self.store / "abort").exists(), f"abort left in {self.store}; {self.process.log_tail()}"


@contextmanager
def run_replica(
    kit: ApacheKit | None,
    folder: Path,
    name_servers: Sequence[str],
    broker_id: int = 0,
    ports: tuple[int, int] | None = None,
) -> Iterator[Replica]:
    """Run a broker and wait until all its name servers know it. Id 0 is the master. With ``ports``, one of ours starts
    again.
    """
    folder.mkdir(exist_ok=ports is not None)
    store, known = folder / "store", ";".join(name_servers)
    port, ha_port = ports = ports or free_ports()[1:]
    role = {} if broker_id == 0 else {"brokerId": broker_id, "brokerRole": "SLAVE"}
    conf = {**CONF, **role, "listenPort": port, "haListenPort": ha_port, "brokerIP1": HOST, "brokerIP2": HOST}
    running = (
        run_broker(store, folder, known, conf) if kit is None else run_apache_broker(kit, store, folder, known, conf)
    )
    with running as (process, _):
        address = f"{HOST}:{port}"
        wait_until(lambda: all(is_member(at, address) for at in name_servers), READY_SECONDS, f"{address} at {known}")
        yield Replica(kit, process, address, ports, store)


def restarted(replica: Replica, name_servers: Sequence[str], broker_id: int) -> AbstractContextManager[Replica]:
    """Restart a stopped broker of ours."""
    return run_replica(None, replica.store.parent, name_servers, broker_id, replica.ports)


def wait_caught_up(master: Replica, slaves: Collection[Replica]) -> None:
    """Wait until the slaves have the master's present log."""
    end = master.log_end
    wait_until(
        lambda: min(slave.log_end for slave in slaves) >= end,
        CAUGHT_UP_SECONDS,
        f"slaves that reach {end}",
        poll_seconds=POLL_SECONDS,
    )


@contextmanager
def frozen(*replicas: Replica) -> Iterator[None]:
    """Stop the processes (SIGSTOP) in the block: their connections stay open, but get no answers."""
    for replica in replicas:
        os.kill(replica.process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for replica in replicas:
            os.kill(replica.process.pid, signal.SIGCONT)


def create_topic(broker_addr: str, topic: str, queue_count: int, attributes: str = "") -> None:
    fields = {
        "topic": topic,
        "defaultTopic": "TBW102",
        "readQueueNums": str(queue_count),
        "writeQueueNums": str(queue_count),
        "perm": "6",
        "topicFilterType": "SINGLE_TAG",
        "topicSysFlag": "0",
        "order": "false",
        **({"attributes": attributes} if attributes else {}),
    }
    answer = ask(broker_addr, Command(RequestCode.UPDATE_AND_CREATE_TOPIC, fields=fields))
    assert answer.code == ResponseCode.SUCCESS, f"{topic}: {answer.code} {answer.remark}"


def message_count(broker_addr: str, topic: str) -> int:
    """Return the number of messages in all possible queues of a topic, 0 for a topic that does not exist."""
    asked = (Command(RequestCode.GET_MAX_OFFSET, fields={"topic": topic, "queueId": str(i)}) for i in range(QUEUES_MAX))
    return sum(int(decode_fields(ask(broker_addr, command))["offset"]) for command in asked)


def tables(replica: Replica) -> dict[str, dict[str, Any]]:
    """Return the tables of `TABLES` by name. A 4.9 slave has its master's delay offsets only in its file."""
    found = {}
    for name, (code, part) in TABLES.items():
        answer = ask(replica.address, Command(code))
        assert answer.code == ResponseCode.SUCCESS, f"{name} of {replica.address}: {answer.code} {answer.remark}"
        found[name] = table_of(answer.payload, part)
    delays = replica.store / "config/delayOffset.json"
    if not found["delays"] and delays.exists():
        found["delays"] = table_of(delays.read_bytes(), "offsetTable")
    return found


def table_of(body: bytes | memoryview, part: str) -> dict[str, Any]:
    return {str(key): value for key, value in loads(body)[part].items()}


def missing_tables(master: Replica, slave: Replica, deadline: float) -> dict[str, object]:
    """Return the entries of its master's tables that a slave has not copied by the deadline."""
    while True:
        originals, copies = tables(master), tables(slave)
        missing: dict[str, object] = {
            f"{name} {key}": (original, copies[name].get(key))
            for name, table in originals.items()
            for key, original in table.items()
            if not is_alike(name, original, copies[name].get(key))
        }
        if not missing or time.monotonic() > deadline:
            return missing
        time.sleep(TABLES_POLL_SECONDS)


def is_alike(table: str, original: Any, copy: Any) -> bool:
    """Return True if two entries are equal; for a topic or a group, in the fields that both makers know."""
    if table not in ("topics", "groups") or copy is None:
        return bool(original == copy)
    shared = original.keys() & copy.keys()
    return bool(shared) and all(original[key] == copy[key] for key in shared)


def log_difference(master: Path, slave: Path, end: int) -> str | None:
    """Return the first difference of two logs below an offset, or None."""
    logs = [(root / "commitlog") for root in (master, slave)]
    start = 0
    for ours, theirs in zip_longest(*(sorted(log.iterdir()) for log in logs)):
        if start >= end:
            return None
        if ours is None or theirs is None or ours.name != theirs.name:
            return f"files {ours} and {theirs} at {start} of {end}"
        part, copy = (path.read_bytes()[: end - start] for path in (ours, theirs))
        if part != copy:
            at = next(i for i, (one, other) in enumerate(zip(part, copy, strict=False)) if one != other)
            return f"offset {start + at}: {part[at : at + 32].hex()} and {copy[at : at + 32].hex()}"
        start += len(part)
    return None if start >= end else f"the log ends at {start}, not {end}"


def derived_differences(master: Path, slave: Path) -> list[str]:
    """Return the queue files that differ between two stores, and the index if its entries differ. (The borders between
    its files differ after a recovery.)"""
    queues = [files(root, "consumequeue", "batchconsumequeue") for root in (master, slave)]
    found, copied = without_new_blank(queues[0], queues[1]), without_new_blank(queues[1], queues[0])
    names = [name for name in found.keys() | copied.keys() if found.get(name) != copied.get(name)]
    if index_entries(master) != index_entries(slave):
        names.append("index")
    return sorted(names)


def index_entries(store: Path) -> set[bytes]:
    """Return hash and physical offset of every index entry."""
    begin = INDEX_HEADER_BYTES + INDEX_SLOT_BYTES * int(str(CONF["maxHashSlotNum"]))
    return {
        content[at : at + INDEX_KEY_BYTES]
        for content in files(store, "index").values()
        for at in range(begin, len(content), INDEX_ENTRY_BYTES)
    }

"""Rounds of a disk that refuses: one kind of file, one operation, one errno, for a while, under mixed load.

A round runs a name server and a broker in virtual time. Before, during and after the refusal it sends plain messages
with keys, batches, inner batches, messages with a delay level or a time, and transactions; it pops, acknowledges, and
commits offsets. Then it compares the broker with its acknowledgements:

==================  ====================================================================================================
checked             how
==================  ====================================================================================================
right answers       every answer has one of the codes of Apache's broker for the fault, and a reason
recovers by itself  `GOES_ON_SECONDS` of virtual time after the disk works again, every kind of request
                    succeeds, in the same process
nothing is lost     every acknowledged message is pulled, delivered or popped again, and found by its key
nothing is hidden   no traceback in the log; the stop is a clean one; ``verify`` finds the store sound
==================  ====================================================================================================

``python -m tests.faults.refusing`` runs every combination and prints a table; ``--rounds 30 --seed 7`` runs a
selection.
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import itertools
import logging
import random
import sys
import tempfile
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rmqkit.core import CORE
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import Command, decode_header
from rmqkit.protocol.ids import decode_offset_id
from rmqkit.protocol.message import read_messages
from rmqkit.protocol.properties import encode_properties
from rmqkit.protocol.record import BatchEntry, encode_batch
from rmqkit.protocol.schemas.offsets import UpdateConsumerOffsetRequest
from rmqkit.protocol.schemas.pull import QueryMessageRequest
from rmqkit.protocol.schemas.send import EndTransactionRequest, SendMessageResponse
from rmqkit.protocol.schemas.topics import CreateTopicRequest
from rmqkit.store.offline import check as fsck
from rmqkit.store.settings import FlushDiskType, StoreSettings
from tests.broker.cluster import Cluster
from tests.broker.pops import ack, pop
from tests.faults.refusals import RefusingDisk
from tests.virtual_time import run as run_virtual

GOES_ON_SECONDS = 10.0
FILES = {
    "commitlog": "/commitlog",
    "consumequeue": "/consumequeue/",
    "consumequeue_ext": "/consumequeue_ext",
    "batchconsumequeue": "/batchconsumequeue",
    "index": "/index",
    "timerlog": "/timerlog",
    "timerwheel": "/timerwheel",
    "checkpoint": "/checkpoint",
    "config": "/config",
    "everything": "/",
}
OPERATIONS = {
    "write": ("pwrite",),
    "fsync": ("sync_file", "sync_data"),
    "open": ("open", "make_directory"),
    "truncate": ("truncate", "reserve"),
    "rename": ("rename",),
}
ERRORS = {"ENOSPC": errno.ENOSPC, "EIO": errno.EIO, "EDQUOT": errno.EDQUOT}
TIMES = {"once": 1, "5 times": 5, "until released": None}
_RENAMED = "index", "config", "everything"
_MADE_ONCE = "checkpoint"
REFUSALS = {
    ResponseCode.SYSTEM_ERROR,
    ResponseCode.SYSTEM_BUSY,
    ResponseCode.FLUSH_DISK_TIMEOUT,
    ResponseCode.SERVICE_NOT_AVAILABLE,
}
"""The answers of Apache's broker while it cannot store: SYSTEM_ERROR if a new log file is missing or a flush fails,
BUSY while a file is being created, else SERVICE_NOT_AVAILABLE."""
TOPICS = "Plain", "Inner", "Level", "Timed", "Trans", "Popped"
_QUEUES = 2


@dataclass(frozen=True)
class Case:
    """The refused operation of a round."""

    files: str
    operation: str
    error: str
    times: str
    number: int

    def __str__(self) -> str:
        return f"{self.operation} of {self.files}, {self.error} {self.times} (round {self.number})"


@dataclass
class Outcome:
    """The result of a round.

    Attributes:
        refused: operations that the disk refused.
        codes: number of answers with each code during the fault.
        acknowledged: number of acknowledged messages.
        seconds: virtual time until every request succeeded again.
        faults: the failed checks.
        log: the broker's log, if a check failed.
    """

    refused: int = 0
    codes: Counter[int] = field(default_factory=Counter)
    acknowledged: int = 0
    seconds: float = 0.0
    faults: list[str] = field(default_factory=list)
    log: list[str] = field(default_factory=list)


class _Tracebacks(logging.Handler):
    """A handler that collects all log lines, and separately those with a traceback."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        self.all: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.all.append(f"{record.levelname} {record.name}: {record.getMessage()}")
        if record.exc_info and record.exc_info[1] is not None:
            self.lines.append(f"{record.name}: {record.getMessage()}: {record.exc_info[1]!r}")


class _Round:
    """A cluster under load, and its acknowledged messages."""

    def __init__(self, cluster: Any, outcome: Outcome) -> None:
        self._cluster = cluster
        self._again: set[bytes] = set()
        self.refusal = ""
        self._outcome = outcome
        self._number = itertools.count()
        self.expected: dict[str, set[bytes]] = {topic: set() for topic in TOPICS}
        self._open: list[EndTransactionRequest] = []
        self._committed = 0

    async def prepare(self) -> None:
        """Create the topics."""
        for topic in TOPICS:
            attributes = "+queue.type=BatchCQ" if topic == "Inner" else None
            header = CreateTopicRequest(topic, "TBW102", _QUEUES, _QUEUES, 6, "SINGLE_TAG", attributes=attributes)
            answer = await self._cluster.call(RequestCode.UPDATE_AND_CREATE_TOPIC, header)
            assert answer.code == ResponseCode.SUCCESS, answer.remark

    def _judge(self, what: str, answer: Command) -> bool:
        """Return whether a request succeeded. A refused request must have a reason."""
        if answer.code == ResponseCode.SUCCESS:
            return True
        self._outcome.codes[answer.code] += 1
        self.refusal = f"{what} was answered {answer.code}: {answer.remark}"
        if answer.code not in REFUSALS or not answer.remark or "Error:" in answer.remark.split("errno")[0]:
            self._outcome.faults.append(self.refusal)
        return False

    async def _send(self, topic: str, properties: dict[str, str], *, code: int = RequestCode.SEND_MESSAGE_V2) -> bool:
        number = next(self._number)
        bodies = [b"%d" % number]
        content = bodies[0]
        fields: dict[str, Any] = {}
        if code == RequestCode.SEND_BATCH_MESSAGE:
            bodies = [b"%d-%d" % (number, member) for member in range(3)]
            content = encode_batch(BatchEntry(body, encode_properties({"KEYS": "b"}), 0) for body in bodies)
            fields["batch"] = True
        named = {"UNIQ_KEY": f"U{number}", "KEYS": f"k{number}", "TAGS": "a"} | properties
        answer = await self._cluster.send(
            topic,
            content,
            encode_properties(named).decode(),
            code,
            queue_id=number % _QUEUES,
            default_topic="TBW102",
            **fields,
        )
        if not self._judge(f"a send to {topic}", answer):
            return False
        if properties.get("TRAN_MSG"):
            sent = decode_header(answer, SendMessageResponse)
            self._open.append(
                EndTransactionRequest(
                    topic=topic,
                    producer_group="p",
                    tran_state_table_offset=sent.queue_offset,
                    commit_log_offset=decode_offset_id(sent.msg_id)[2],
                    commit_or_rollback=8,
                    transaction_id=f"U{number}",
                )
            )
        self.expected[topic] |= set(bodies)
        self._outcome.acknowledged += len(bodies)
        return True

    async def _commit_transactions(self) -> bool:
        done = True
        for header in list(self._open):
            answer = await self._cluster.call(RequestCode.END_TRANSACTION, header)
            if self._judge("the end of a transaction", answer):
                self._open.remove(header)
            else:
                done = False
        return done

    async def _pop(self) -> bool:
        popped = await pop(self._cluster, topic="Popped", max_msg_nums=4, invisible_time=10_000)
        if popped.code not in (ResponseCode.SUCCESS, ResponseCode.POLLING_TIMEOUT, ResponseCode.PULL_NOT_FOUND):
            return self._judge("a pop", Command(popped.code, remark=popped.remark))
        done = True
        for body in list(popped)[::2]:
            answer = await ack(self._cluster, popped.handles[body], topic="Popped")
            if self._judge("an ack", answer):
                self.expected["Popped"].discard(body.encode())
            else:
                done = False
        return done

    async def _commit_offset(self) -> bool:
        header = UpdateConsumerOffsetRequest("g", "Plain", 0, self._committed + 1)
        done = self._judge("a commit", await self._cluster.call(RequestCode.UPDATE_CONSUMER_OFFSET, header))
        self._committed += done
        return done

    async def load(self) -> bool:
        """Send, pop and commit once each. Return whether all requests succeeded."""
        batch = RequestCode.SEND_BATCH_MESSAGE
        done = await asyncio.gather(
            *(self._send("Plain", {"a": "x" * (97 * i)}) for i in range(8)),
            self._send("Plain", {}, code=batch),
            self._send("Inner", {}, code=batch),
            self._send("Level", {"DELAY": "1"}),
            self._send("Timed", {"TIMER_DELAY_MS": "2000"}),
            self._send("Trans", {"TRAN_MSG": "true", "PGROUP": "p"}),
            self._send("Popped", {}),
            self._send("Popped", {}),
            self._commit_transactions(),
            self._pop(),
            self._commit_offset(),
        )
        return all(done)

    # ---- checks at the end

    async def missing(self) -> dict[str, set[bytes]]:
        """Return acknowledged messages that are not readable yet, by topic."""
        await self._commit_transactions()
        found = {topic: await self._pulled(topic) for topic in TOPICS if topic != "Popped"}
        popped = await pop(self._cluster, topic="Popped", invisible_time=600_000)
        self._again.update(body.encode() for body in popped)
        found["Popped"] = self._again
        return {topic: left for topic in TOPICS if (left := self.expected[topic] - found[topic])}

    async def _pulled(self, topic: str) -> set[bytes]:
        bodies: set[bytes] = set()
        for queue_id in range(_QUEUES):
            offset = 0
            while True:
                answer = await self._cluster.pull(offset, topic, queue_id, flags=4)
                if answer.code != ResponseCode.SUCCESS:
                    break
                messages = read_messages(answer.body)
                bodies |= {bytes(one.body) for one in messages}
                offset = messages[-1].queue_offset + 1
        return bodies

    async def unfound_keys(self) -> list[bytes]:
        """Return plain messages that a query by their key does not find."""
        unfound = []
        for body in sorted(self.expected["Plain"]):
            if b"-" in body:
                continue
            header = QueryMessageRequest(
                topic="Plain", key=f"k{body.decode()}", max_num=8, begin_timestamp=0, end_timestamp=1 << 62
            )
            answer = await self._cluster.call(RequestCode.QUERY_MESSAGE, header)
            is_found = answer.code == ResponseCode.SUCCESS
            if not is_found or body not in {bytes(one.body) for one in read_messages(answer.body)}:
                unfound.append(body)
        return unfound


def cases() -> list[Case]:
    """Return every combination that occurs: only notes and tables are renamed, and a checkpoint gets its length only
    once.
    """
    found = itertools.product(FILES, OPERATIONS, ERRORS, TIMES)
    return [
        Case(files, operation, error, times, number)
        for number, (files, operation, error, times) in enumerate(found)
        if (operation != "rename" or files in _RENAMED) and (operation != "truncate" or files != _MADE_ONCE)
    ]


def _settings(case: Case, chance: random.Random) -> StoreSettings:
    is_sync = chance.random() < 0.5
    return StoreSettings(
        commit_log_file_bytes=16_384,
        consume_queue_file_bytes=200,
        batch_consume_queue_file_bytes=92,
        consume_queue_ext_file_bytes=500,
        enable_consume_queue_ext=case.files == "consumequeue_ext" or chance.random() < 0.2,
        hash_slot_count=16,
        # If not all keys fit into the file, the compiled core leaves them to the Python code.
        index_entry_count=chance.choice((60, 5000)),
        timer_log_file_bytes=160,
        flush_disk_type=FlushDiskType.SYNC_FLUSH if is_sync else FlushDiskType.ASYNC_FLUSH,
        transient_store_pool=not is_sync and chance.random() < 0.2,
        flush_interval_ms=5,
        flush_least_pages=0,
        queue_flush_interval_ms=10,
        queue_flush_least_pages=0,
        queue_flush_thorough_interval_ms=20,
        commit_interval_ms=5,
        commit_least_pages=0,
        disk_warning_percent=99,
    )


async def _run(case: Case, root: Path, disk: RefusingDisk, outcome: Outcome) -> None:
    chance = random.Random(case.number)
    settings = _settings(case, chance)
    loop = asyncio.get_running_loop()
    store = {name: getattr(settings, name) for name in settings.__struct_fields__}
    broker = {"offset_persist_interval_ms": 500, "delay_offset_persist_interval_ms": 500}
    async with Cluster(root, store=store, broker=broker) as cluster:
        work = _Round(cluster, outcome)
        await work.prepare()
        for _ in range(2):
            if not await work.load():
                outcome.faults.append(f"before the disk refused anything {work.refusal}")
            await asyncio.sleep(0.3)
        outcome.codes.clear()
        disk.refuse(
            ERRORS[case.error],
            *OPERATIONS[case.operation],
            path=str(root) + "/" if case.files == "everything" else FILES[case.files],
            times=TIMES[case.times],
            taken_bytes=chance.choice((0, 0, 7)) if case.operation == "write" else 0,
        )
        for _ in range(4):
            await work.load()
            await asyncio.sleep(chance.choice((0.05, 0.5, 1.5)))
        outcome.refused = disk.count
        disk.repair()
        since = loop.time()
        while not await work.load():
            if loop.time() - since > GOES_ON_SECONDS:
                outcome.faults.append(f"{GOES_ON_SECONDS:g} s after the disk was released {work.refusal}")
                break
            await asyncio.sleep(0.25)
        outcome.seconds = loop.time() - since
        since = loop.time()
        while missing := await work.missing():
            if loop.time() - since > 120:
                outcome.faults.append(f"acknowledged and lost: {missing}")
                break
            await asyncio.sleep(1)
        if unfound := await work.unfound_keys():
            outcome.faults.append(f"keys find nothing: {unfound}")
    if (root / "abort").exists():
        outcome.faults.append("the stop was not a clean one")
    report = fsck.verify(root, settings)
    if not report.is_sound:
        outcome.faults.append(f"verify: {report.findings[:3]}")


def run_case(case: Case) -> Outcome:
    """Run one round."""
    outcome, tracebacks = Outcome(), _Tracebacks()
    logger, loop_logger = logging.getLogger("rmqkit"), logging.getLogger("asyncio")
    level = logger.level
    logger.setLevel(logging.WARNING)
    for one in (logger, loop_logger):
        one.addHandler(tracebacks)
        one.propagate = False
    try:
        with tempfile.TemporaryDirectory() as folder, RefusingDisk().installed() as disk:
            try:
                run_virtual(_run(case, Path(folder) / "s", disk, outcome))
            except Exception as error:  # noqa: BLE001 - a round that breaks is a fault, and the others go on
                outcome.faults.append(f"{type(error).__name__}: {error}")
    finally:
        logger.setLevel(level)
        for one in (logger, loop_logger):
            one.removeHandler(tracebacks)
            one.propagate = True
    outcome.faults += [f"traceback: {line}" for line in dict.fromkeys(tracebacks.lines)]
    if outcome.faults:
        outcome.log = tracebacks.all
    return outcome


def run_cases(chosen: list[Case], *, is_told: bool = False) -> dict[Case, Outcome]:
    """Run rounds one after the other."""
    outcomes = {}
    for case in chosen:
        began = time.monotonic()
        outcomes[case] = run_case(case)
        if is_told:
            print(f"{case}: {outcomes[case]} in {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
    return outcomes


def table(outcomes: dict[Case, Outcome]) -> str:
    """Return a table of rounds, refused operations and the longest recovery time, by file and operation."""
    cells: dict[tuple[str, str], list[Outcome]] = defaultdict(list)
    for case, outcome in outcomes.items():
        cells[case.files, case.operation].append(outcome)
    lines = ["file class         " + "".join(f"{operation:>24}" for operation in OPERATIONS)]
    for files in FILES:
        line = f"{files:<19}"
        for operation in OPERATIONS:
            found = cells.get((files, operation), [])
            wrong = sum(bool(one.faults) for one in found)
            refused, longest = sum(one.refused for one in found), max((one.seconds for one in found), default=0)
            cell = f"{len(found)} rounds {refused} / {longest:.1f} s" + (f" {wrong} WRONG" if wrong else "")
            line += f"{cell if found else '-':>24}"
        lines.append(line)
    refused, stored = sum(one.refused for one in outcomes.values()), sum(one.acknowledged for one in outcomes.values())
    codes = sum((one.codes for one in outcomes.values()), Counter[int]())
    wrong = sum(bool(one.faults) for one in outcomes.values())
    told = ", ".join(f"{ResponseCode(code).name} {count}" for code, count in sorted(codes.items()))
    lines.append(
        f"{len(outcomes)} rounds, {'plain Python' if CORE.fault else 'compiled core'}: "
        f"{refused} operations refused; {stored} messages acknowledged; "
        f"refusals answered: {told or 'none'}; {wrong} rounds wrong"
    )
    lines += [f"WRONG {case}: {fault}" for case, outcome in outcomes.items() for fault in outcome.faults]
    return "\n".join(lines)


def choose(count: int | None, seed: int) -> list[Case]:
    """Choose ``count`` rounds. Every file class with every operation comes once before any comes twice."""
    found = cases()
    if count is None:
        return found
    random.Random(seed).shuffle(found)
    seen: Counter[tuple[str, str]] = Counter()
    ranked = []
    for case in found:
        ranked.append((seen[case.files, case.operation], case))
        seen[case.files, case.operation] += 1
    return [case for _, case in sorted(ranked, key=lambda one: one[0])[:count]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, help="so many rounds of a choice; without it every combination")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, nargs="*", help="the rounds of these numbers")
    parser.add_argument("--verbose", action="store_true", help="print each round")
    given = parser.parse_args()
    chosen = choose(given.rounds, given.seed)
    if given.only:
        chosen = [case for case in cases() if case.number in given.only]
    outcomes = run_cases(chosen, is_told=given.verbose)
    print(table(outcomes))
    return any(one.faults for one in outcomes.values())


if __name__ == "__main__":
    sys.exit(main())

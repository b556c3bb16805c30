"""Apache's transaction producer against our broker and against Apache's own: every way a transaction can end.

The Java program runs once per pair: commit, rollback, unknown and then committed, rolled back or never decided,
listeners that throw or answer null, a large body, an immunity time of a message. Except for ids and places, all events
and stored messages are equal.
"""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.command import Command, decode_fields
from rmqkit.protocol.properties import decode_properties
from rmqkit.protocol.record import Record, iter_records
from rmqkit.protocol.schemas.pull import PullFlag
from tests.interop.apache import TRANSACTION_CONF, ApachePair, ask
from tests.interop.conftest import kit_or_skip
from tests.interop.kit import ApacheKit
from tests.interop.probe import PROBE_HEAP_MB
from tests.interop.server_process import wait_until
from tests.interop.standalone import run_standalone

SECONDS_MAX = 200
CHECKS_MAX = int(str(TRANSACTION_CONF["transactionCheckMax"]))
GIVEN_UP_TOPIC = "TRANS_CHECK_MAX_TIME_TOPIC"
COMMITTED = ["commit-large:unknown", "commit-tagged:unknown", "commit:unknown", "throw:commit", "unknown-immune:commit",
             "unknown:commit"]  # fmt: skip
NEVER_DECIDED = ["unknown:throw", "unknown:unknown"]
AT_ONCE = {"commit-large:unknown", "commit-tagged:unknown", "commit:unknown", "rollback:unknown"}
PLACES = ("uniqKey", "msgId", "offsetMsgId", "queueId", "queueOffset", "physicalOffset", "storeSizeBytes", "bornHost")
TIMES_AND_HOSTS = ("storeHost", "bornTimestampMs", "storeTimestampMs", "preparedOffset", "topic")
IDS = ("UNIQ_KEY", "__transactionId__", "CLUSTER", "REAL_TOPIC", "REAL_QID", "TRAN_PREPARED_QUEUE_OFFSET",
       "TRANSACTION_CHECK_TIMES")  # fmt: skip
CLIENTS_OWN = ("MIN_OFFSET", "MAX_OFFSET", "CONSUME_START_TIME")
OURS = [("standalone", "5.4.0"), ("standalone", "4.9.4")]
ALL = [("apache", "5.4.0"), *OURS]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The report of one run without ids and places, and the messages that it left in the store."""

    events: list[dict[str, Any]]
    given_up: list[dict[str, str]]
    stored: int

    def of(self, kind: str) -> list[dict[str, Any]]:
        return sorted(
            (event for event in self.events if event["event"] == kind), key=lambda e: (e["kind"], e.get("count", ""))
        )

    def comparable(self, kind: str) -> list[dict[str, Any]]:
        """Return the events that do not depend on the times of the check cycles: without the message with its own
        immunity time, and only first checks, without those of transactions that were decided at once."""
        found = [e for e in self.of(kind) if "immune" not in e["kind"] and e.get("count", "1") == "1"]
        found = [e for e in found if kind != "question" or e["kind"] not in AT_ONCE]
        return [e for i, e in enumerate(found) if e not in found[:i]]

    def asked(self) -> Counter[str]:
        """Return the number of checks of each transaction."""
        return Counter(question["kind"] for question in self.of("question"))


Run = Callable[[str, str], Outcome]


@pytest.fixture(scope="module")
def run(apache: ApachePair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Run the program with all pairs of a server and a client version at the same time: it mostly waits for checks."""
    kits = {version: kit_or_skip(version) for _, version in ALL}
    with ThreadPoolExecutor(len(ALL)) as threads:
        outcomes = {}
        for server, version in ALL:
            work_dir = tmp_path_factory.mktemp(f"{server}-{version}")
            opened = nullcontext(apache) if server == "apache" else _ours(work_dir)
            outcomes[server, version] = threads.submit(_run, opened, kits[version], work_dir)
        yield lambda server, version: outcomes[server, version].result()


def _run(opened: AbstractContextManager[Any], kit: ApacheKit, work_dir: Path) -> Outcome:
    topic = f"Transactions-{kit.version.replace('.', '_')}"
    with opened as pair:
        out = work_dir / "out.jsonl"
        arguments = ["run", "--namesrv", pair.namesrv_addr, "--topic", topic, "--out", out, "--checks-max", CHECKS_MAX]
        arguments += ["--timeout-seconds", SECONDS_MAX]
        command = kit.jvm("interop.TransactionProbe", arguments, heap_mb=PROBE_HEAP_MB, work_dir=work_dir)
        ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=2 * SECONDS_MAX)
        lines = out.read_text().splitlines()
        assert ended.returncode == 0, f"{ended.stdout[-2000:]}{ended.stderr[-2000:]}{lines[-1:]}"
        given_up: list[Record] = []

        def is_given_up() -> bool:
            given_up[:] = [r for r in _records(pair.broker_addr, GIVEN_UP_TOPIC) if topic.encode() in r.properties]
            return len(given_up) >= len(NEVER_DECIDED)

        wait_until(is_given_up, SECONDS_MAX, f"{len(NEVER_DECIDED)} messages in {GIVEN_UP_TOPIC}")
        stored = sum(_end(pair.broker_addr, topic, queue_id) for queue_id in range(4))
    events = [_without_ids(json.loads(line)) for line in lines]
    properties = [_own(decode_properties(record.properties)) for record in given_up]
    return Outcome(events, sorted(properties, key=lambda one: one["KEYS"]), stored)


@contextmanager
def _ours(work_dir: Path) -> Iterator[Any]:
    conf = work_dir / "broker.conf"
    conf.write_text("".join(f"{key}={value}\n" for key, value in TRANSACTION_CONF.items()))
    with run_standalone(work_dir / "store", work_dir, "--config", str(conf)) as running:
        yield running
        running.stop()


def _records(address: str, topic: str) -> list[Record]:
    fields = {
        "consumerGroup": "g", "topic": topic, "queueId": "0", "queueOffset": "0", "maxMsgNums": "32",
        "sysFlag": str(int(PullFlag.SUBSCRIPTION)), "commitOffset": "0", "suspendTimeoutMillis": "0", "subVersion": "0",
        "subscription": "*",
    }  # fmt: skip
    answer = ask(address, Command(RequestCode.PULL_MESSAGE, fields=fields))
    return list(iter_records(answer.payload)) if answer.code == 0 else []


def _end(address: str, topic: str, queue_id: int) -> int:
    fields = {"topic": topic, "queueId": str(queue_id)}
    return int(decode_fields(ask(address, Command(RequestCode.GET_MAX_OFFSET, fields=fields)))["offset"])


def _without_ids(event: dict[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in event.items() if name not in PLACES and name not in TIMES_AND_HOSTS}
    return kept | {name: _own(kept[name]) for name in ("properties", "userProperties") if name in kept}


def _own(properties: dict[str, str]) -> dict[str, str]:
    """Return properties without the values of ids, places and counters, and without those that clients add
    themselves.
    """
    return {name: "" if name in IDS else value for name, value in properties.items() if name not in CLIENTS_OWN}


@pytest.mark.parametrize("pair", ALL, ids="-".join)
def test_what_is_committed_arrives_once_and_nothing_else(run: Run, pair: tuple[str, str]) -> None:
    outcome = run(*pair)
    received = outcome.of("received")

    times = Counter(message["kind"] for message in received)
    assert sorted(times) == COMMITTED
    # If the answer to a check took longer than a check cycle on a busy machine, both checks are answered with a commit.
    assert all(count <= max(1, outcome.asked()[kind]) for kind, count in times.items())
    assert len(received) <= outcome.stored <= sum(max(1, outcome.asked()[kind]) for kind in COMMITTED)
    assert all(message["hasTransactionId"] for message in received)
    assert {message["sysFlag"] & 0xC for message in received} == {0x8}


@pytest.mark.parametrize("pair", ALL, ids="-".join)
def test_who_is_asked_and_how_often(run: Run, pair: tuple[str, str]) -> None:
    outcome = run(*pair)
    asked = outcome.asked()

    assert {kind: count for kind, count in asked.items() if kind in NEVER_DECIDED} == dict.fromkeys(
        NEVER_DECIDED, CHECKS_MAX
    )
    # Transactions that were decided at once are checked only if the decision took longer than a check cycle on a busy
    # machine.
    decided = {kind for kind in asked if kind.startswith(("commit", "rollback"))}
    assert len(decided) < len(AT_ONCE)
    assert asked.keys() - decided == {"unknown:commit", "unknown:rollback", "throw:commit", "null:rollback",
                            "unknown-immune:commit", *NEVER_DECIDED}  # fmt: skip
    assert [one["KEYS"] for one in outcome.given_up] == NEVER_DECIDED


@pytest.mark.parametrize("pair", OURS, ids="-".join)
def test_sends_are_answered_as_by_apaches_broker(run: Run, pair: tuple[str, str]) -> None:
    assert run(*pair).of("sent") == run("apache", "5.4.0").of("sent")


def test_what_is_asked_and_what_arrives_is_the_same_as_from_apaches_broker(run: Run) -> None:
    ours, theirs = (run(server, "5.4.0") for server in ("standalone", "apache"))

    assert ours.comparable("received") == theirs.comparable("received")
    assert ours.comparable("question") == theirs.comparable("question")


@pytest.mark.parametrize("pair", OURS, ids="-".join)
def test_the_store_keeps_the_same_of_what_was_given_up(run: Run, pair: tuple[str, str]) -> None:
    assert run(*pair).given_up == run("apache", "5.4.0").given_up

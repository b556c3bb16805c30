"""Apache's broker and ours count the same under the same load: runtime information, counters, progress of all groups.

Counts and their averages are equal. Times are in the same unit but not equal. Apache's counters are those of its last
sample, taken every ten seconds: they are read until they equal ours, which are immediate. Our broker does not report
IDLE and EXCEPTION of CHANNEL_ACTIVITY. Only our broker reports the key ``brokerVersion``. Source: behaviour.md §9.10;
remoting.md §6.6, §6.7.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from rmqkit.broker.settings import BrokerSettings
from rmqkit.protocol.codes import RequestCode as Code
from rmqkit.protocol.command import Command, decode_fields
from rmqkit.protocol.fastjson import decode_as
from rmqkit.protocol.record import BatchEntry, encode_batch
from rmqkit.protocol.schemas.offsets import ConsumeStats, ConsumeStatsList
from rmqkit.remoting.client import RemotingClient
from rmqkit.remoting.router import Router
from rmqkit.standalone import Standalone
from rmqkit.store.settings import StoreSettings
from tests.interop.apache import BROKER_NAME, CLUSTER, ApachePair
from tests.patience import TIMEOUT_MS

TOPIC, GROUP, POPPERS = "Counted", "counting", "counting_poppers"
RETRY, DLQ = f"%RETRY%{GROUP}", f"%DLQ%{GROUP}"
DELAYED = "SCHEDULE_TOPIC_XXXX"
SECONDS_MAX = 150
ROUNDS_MAX = 5
Fields = dict[str, Any]

COUNTED = [
    *((f"TOPIC_PUT_{what}", topic) for what in ("NUMS", "SIZE") for topic in (TOPIC, DLQ)),
    *((f"GROUP_GET_{what}", f"{TOPIC}@{group}") for what in ("NUMS", "SIZE") for group in (GROUP, POPPERS)),
    *((f"GROUP_{what}_NUMS", f"{TOPIC}@{POPPERS}") for what in ("CK", "ACK")),
    ("SNDBCK_PUT_NUMS", f"{TOPIC}@{GROUP}"),
    ("SNDBCK2DLQ_TIMES", f"null@{TOPIC}@{GROUP}@SEND_BACK_TO_DLQ"),
]
"""Counters that only this load changes."""

TIMED = [
    *(("TOPIC_PUT_LATENCY", f"{queue_id}@{TOPIC}") for queue_id in range(4)),
    ("TOPIC_PUT_LATENCY", f"0@{DLQ}"),
    *(("GROUP_GET_LATENCY", f"{queue_id}@{TOPIC}@{GROUP}") for queue_id in (0, 1, 3)),
    ("GROUP_GET_LATENCY", f"0@{TOPIC}@{POPPERS}"),
    *((f"{kind}_REGISTER_TIME", CLUSTER) for kind in ("PRODUCER", "CONSUMER")),
]
OF_THE_BROKER = [
    *((f"BROKER_{way}_NUMS{part}", CLUSTER) for way in ("PUT", "GET") for part in ("", "_WITHOUT_SYSTEM_TOPIC")),
    *((f"BROKER_{what}_NUMS", CLUSTER) for what in ("CK", "ACK")),
    *(("CHANNEL_ACTIVITY", what) for what in ("CONNECT", "CLOSE")),
    *((f"TOPIC_PUT_{what}", DELAYED) for what in ("NUMS", "SIZE")),
    ("TOPIC_PUT_LATENCY", f"0@{DELAYED}"),
    *((f"GROUP_GET_{what}", f"{DELAYED}@SCHEDULE_CONSUMER") for what in ("NUMS", "SIZE")),
    *((f"QUEUE_PUT_{what}", f"{DELAYED}@0") for what in ("NUMS", "SIZE")),
    *((f"QUEUE_GET_{what}", f"{DELAYED}@0@SCHEDULE_CONSUMER") for what in ("NUMS", "SIZE")),
]
"""Counters that other tests change too."""

NOT_THERE = [
    *(("TOPIC_PUT_NUMS", "nobody"), ("NONE", TOPIC), ("QUEUE_PUT_NUMS", f"{TOPIC}@0")),
    *((f"QUEUE_GET_{what}", f"{TOPIC}@0@{GROUP}") for what in ("NUMS", "SIZE")),
    ("DLQ_PUT_NUMS", f"{TOPIC}@{GROUP}"),
    ("GROUP_GET_LATENCY", f"2@{TOPIC}@{GROUP}"),
]
SENT, BATCH, GIVEN = 6, 5, 12
MOVED = {
    "putMessageTimesTotal": SENT + BATCH,
    "msgPutTotalTodayNow": SENT + BATCH,
    "msgGetTotalTodayNow": GIVEN,
    "msgPutTotalTodayMorning": 0,
    "msgGetTotalTodayMorning": 0,
    "putMessageFailedTimes": 0,
}
"""The changes of the runtime information by a plain round, and the changes of bytes, which are only compared."""


@dataclass
class Side:
    """One broker, and its reported figures."""

    address: str
    moved: dict[str, int] = field(default_factory=dict)
    runtime: dict[str, str] = field(default_factory=dict)
    counters: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    refusals: dict[tuple[str, str], tuple[int, str | None]] = field(default_factory=dict)
    progress: dict[str, list[ConsumeStats]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        dispatch = Router()
        for code in (Code.NOTIFY_CONSUMER_IDS_CHANGED, Code.CHECK_TRANSACTION_STATE):
            dispatch.register(code, lambda connection, command: None)
        self.client = RemotingClient(dispatch)

    async def ask(self, code: int, body: bytes = b"", **fields: Any) -> Command:
        texts = {name: str(value) for name, value in fields.items()}
        return await self.client.call(self.address, Command(code, fields=texts or None, body=body), TIMEOUT_MS)

    async def info(self) -> dict[str, str]:
        table: dict[str, str] = json.loads((await self.ask(Code.GET_BROKER_RUNTIME_INFO)).payload)["table"]
        return table

    async def send(self, queue_id: int, properties: str = "", body: bytes = bytes(100), **more: Any) -> Command:
        values = ("p", TOPIC, "TBW102", 4, queue_id, 0, 1_700_000_000_000, 0)
        key = f"{properties}UNIQ_KEY\x010A{time.time_ns():030X}\x02"
        fields: Fields = {
            **dict(zip("abcdefgh", values, strict=True)),
            "i": key,
            "j": 0,
            "k": "false",
            "m": "false",
            **more,
        }
        code = Code.SEND_BATCH_MESSAGE if fields["m"] == "true" else Code.SEND_MESSAGE_V2
        return succeeded(await self.ask(code, body, **fields))

    async def begin(self) -> None:
        numbers: Fields = {"readQueueNums": 4, "writeQueueNums": 4, "perm": 6, "topicSysFlag": 0}
        made: Fields = {
            "topic": TOPIC,
            "defaultTopic": "TBW102",
            "topicFilterType": "SINGLE_TAG",
            "order": "false",
            **numbers,
        }
        succeeded(await self.ask(Code.UPDATE_AND_CREATE_TOPIC, **made))
        group: Fields = {"groupName": GROUP, "consumeType": "CONSUME_PASSIVELY", "messageModel": "CLUSTERING"}
        group |= {"subscriptionDataSet": [{"topic": TOPIC, "subString": "*", "subVersion": 1}]}
        beat = {"clientID": "counting", "producerDataSet": [{"groupName": "p"}], "consumerDataSet": [group]}
        succeeded(await self.ask(Code.HEART_BEAT, json.dumps(beat).encode()))
        passer_by = RemotingClient(Router())
        await passer_by.call(self.address, Command(Code.GET_BROKER_RUNTIME_INFO), TIMEOUT_MS)
        await passer_by.close()

    async def plain_round(self, number: int) -> None:
        """Send and pull, and record the changes in the runtime information."""
        before = await self.info()
        for queue_id in (0, 0, 0, 1, 1, 2):
            await self.send(queue_id)
        await self.send(3, body=encode_batch([BatchEntry(bytes(50), b"", 0)] * BATCH), m="true")
        starts = {0: 3 * number, 1: 2 * number, 3: BATCH * number}

        async def is_readable() -> bool:
            asked = [self.ask(Code.GET_MAX_OFFSET, topic=TOPIC, queueId=queue_id) for queue_id in range(4)]
            ends = [int(decode_fields(succeeded(await one))["offset"]) for one in asked]
            return ends == [3 * number + 3, 2 * number + 2, number + 1, BATCH * (number + 1)]

        await until(is_readable)
        for queue_id, count in ((0, 2), (0, 32), (1, 32), (3, 32), (2, 0)):
            await self.pull(queue_id, starts.get(queue_id, number + 1), count)
        after = await self.info()
        names = (*MOVED, "putMessageSizeTotal", "commitLogMaxOffset")
        self.moved = {name: int(after[name]) - int(before[name]) for name in names}

    async def pull(self, queue_id: int, offset: int, count: int) -> None:
        """Pull messages, or at the end of the queue for a count of 0."""
        where: Fields = {"consumerGroup": GROUP, "topic": TOPIC, "queueId": queue_id, "queueOffset": offset}
        how: Fields = {"maxMsgNums": count or 1, "sysFlag": 7 if count else 5, "commitOffset": offset, "subVersion": 1}
        answer = await self.ask(
            Code.PULL_MESSAGE, **where, **how, suspendTimeoutMillis=15_000, subscription="*", expressionType="TAG"
        )
        assert answer.code == (0 if count else 19), answer.remark

    async def odd_ones(self) -> None:
        """Send a delayed message, a message sent back, one with too many tries, a transaction, and use pop and ack."""
        sent = decode_fields(await self.send(2))
        back: Fields = {
            "group": GROUP,
            "offset": int(sent["msgId"][16:], 16),
            "delayLevel": -1,
            "originMsgId": sent["msgId"],
        }
        succeeded(await self.ask(Code.CONSUMER_SEND_MSG_BACK, **back, originTopic=TOPIC, unitMode="false"))
        await self.send(0, f"RETRY_TOPIC\x01{TOPIC}\x02", b=RETRY, j=17, l=16)
        half = decode_fields(await self.send(1, "TRAN_MSG\x01true\x02PGROUP\x01p\x02", f=4))
        end: Fields = {
            "commitLogOffset": int(half["msgId"][16:], 16),
            "commitOrRollback": 8,
            "msgId": half["transactionId"],
        }
        end |= {"producerGroup": "p", "tranStateTableOffset": half["queueOffset"], "fromTransactionCheck": "false"}
        succeeded(await self.ask(Code.END_TRANSACTION, **end, transactionId=half["transactionId"]))
        await self.send(0, "DELAY\x011\x02")
        pop: Fields = {"consumerGroup": POPPERS, "topic": TOPIC, "queueId": 0, "maxMsgNums": 1, "invisibleTime": 60_000}
        more: Fields = {"pollTime": 0, "bornTime": time.time_ns() // 10**6, "initMode": 0, "expType": "TAG", "exp": "*"}
        popped = decode_fields(succeeded(await self.ask(Code.POP_MESSAGE, **pop, **more, order="false")))
        handle = f"0 {popped['popTime']} {popped['invisibleTime']} {popped['reviveQid']} 0 {BROKER_NAME} 0"
        acked: Fields = {"consumerGroup": POPPERS, "topic": TOPIC, "queueId": 0, "extraInfo": handle, "offset": 0}
        succeeded(await self.ask(Code.ACK_MESSAGE, **acked))

    async def counter(self, name: str, key: str) -> Command:
        return await self.ask(Code.VIEW_BROKER_STATS_DATA, statsName=name, statsKey=key)

    async def read(self) -> None:
        for place in (*COUNTED, *TIMED, *OF_THE_BROKER):
            found = await self.counter(*place)
            self.counters[place] = json.loads(found.payload) if found.code == 0 else {}
        for place in NOT_THERE:
            answer = await self.counter(*place)
            self.refusals[place] = answer.code, answer.remark
        self.runtime = await self.info()
        stats = await self.ask(Code.GET_BROKER_CONSUME_STATS, isOrder="false")
        groups = decode_as(stats.payload, ConsumeStatsList).consume_stats_list
        self.progress = {name: several for one in groups for name, several in one.items()}

    def sums(self) -> dict[tuple[str, str], tuple[int, float]]:
        """Return sums of the last minute, and averages."""
        minutes = {place: self.counters[place].get("statsMinute", {}) for place in COUNTED}
        return {place: (one.get("sum", -1), round(one.get("avgpt", -1), 3)) for place, one in minutes.items()}


def succeeded(answer: Command) -> Command:
    assert answer.code == 0, answer.remark
    return answer


async def until(is_so: Callable[[], Awaitable[bool]]) -> None:
    """Call ``is_so`` until it returns True or the time of the test is over."""
    deadline = time.monotonic() + SECONDS_MAX
    while not await is_so() and time.monotonic() < deadline:
        await asyncio.sleep(0.2)


async def measure(theirs: Side, ours: Side) -> None:
    try:
        for side in (theirs, ours):
            await side.begin()
        for number in range(ROUNDS_MAX):
            for side in (theirs, ours):
                await side.plain_round(number)
            # Otherwise Apache's broker delivered a message of another test during the round.
            if theirs.moved == ours.moved:
                break
        for side in (theirs, ours):
            await side.odd_ones()

        async def is_delivered() -> bool:
            return (await ours.counter("GROUP_GET_NUMS", f"{DELAYED}@SCHEDULE_CONSUMER")).code == 0

        async def is_sampled() -> bool:
            await theirs.read()
            return theirs.sums() == ours.sums() and all(theirs.counters.values())

        await until(is_delivered)
        await ours.read()
        await until(is_sampled)
    finally:
        for side in (theirs, ours):
            await side.client.close()


@pytest.fixture(scope="module")
def sides(apache: ApachePair, tmp_path_factory: pytest.TempPathFactory) -> tuple[Side, Side]:
    broker = BrokerSettings(listen_port=0, bind_address="127.0.0.1", broker_name=BROKER_NAME, cluster_name=CLUSTER)
    root = tmp_path_factory.mktemp("ours") / "store"

    async def run() -> tuple[Side, Side]:
        async with Standalone(root, broker=broker, store=StoreSettings(commit_log_file_bytes=1 << 20)) as standalone:
            both = Side(apache.broker_addr), Side(standalone.broker_address)
            await measure(*both)
            return both

    return asyncio.run(run())


def test_totals_of_the_runtime_information_move_by_the_same(sides: tuple[Side, Side]) -> None:
    theirs, ours = sides
    assert ours.moved == theirs.moved
    assert {name: ours.moved[name] for name in MOVED} == MOVED
    assert ours.moved["putMessageSizeTotal"] > 0


def test_the_runtime_information_has_the_same_keys_and_forms(sides: tuple[Side, Side]) -> None:
    theirs, ours = (
        {re.sub(r"_/.*", "_<path>", re.sub(r"_\d+$", "_<level>", key)): text for key, text in side.runtime.items()}
        for side in sides
    )
    assert ours.keys() - theirs.keys() == {"brokerVersion"}
    assert theirs.keys() - ours.keys() == set()
    spans = [re.sub(r":\d+", "", table["putMessageDistributeTime"]) for table in (theirs, ours)]
    assert spans[0] in (spans[1], "null")  # Apache's broker answers "null" until its first minute is over
    assert spans[1].startswith("[<=0ms] [0~10ms] [10~50ms]")
    for name in ("dispatchMaxBuffer", "pageCacheLockTimeMills", "remainTransientStoreBufferNumbs"):
        assert ours[name] == theirs[name]
    for name in ("putTps", "getFoundTps", "getMissTps", "getTransferredTps", "getTotalTps"):
        assert all(len([float(rate) for rate in table[name].split()]) <= 3 for table in (theirs, ours))
    for name in ("putLatency99", "putLatency999"):
        assert all(re.fullmatch(r"\d+\.\d\d", table[name]) for table in (theirs, ours))


def test_counters_of_topics_and_groups_have_the_same_sums_and_averages(sides: tuple[Side, Side]) -> None:
    theirs, ours = sides
    assert ours.sums() == theirs.sums()
    assert all(count > 0 for count, _ in ours.sums().values())


@pytest.mark.parametrize("places", [COUNTED, TIMED, OF_THE_BROKER], ids=["counts", "times", "of the broker"])
def test_both_brokers_keep_every_counter(sides: tuple[Side, Side], places: list[tuple[str, str]]) -> None:
    for side in sides:
        assert {place for place in places if not side.counters[place]} == set()
    theirs, ours = ({place: one for place, one in side.counters.items() if place in places} for side in sides)
    for place in places:
        spans = [{name: sorted(item) for name, item in side[place].items()} for side in (theirs, ours)]
        assert spans[0] == spans[1]
        if place[0].startswith("BROKER"):  # sums without a count
            assert [side[place]["statsMinute"]["avgpt"] for side in (theirs, ours)] == [0, 0]


def test_neither_knows_the_others(sides: tuple[Side, Side]) -> None:
    theirs, ours = sides
    assert ours.refusals == theirs.refusals
    assert {code for code, _ in ours.refusals.values()} == {1}


def test_groups_are_at_the_same_offsets_and_consume_at_a_rate(sides: tuple[Side, Side]) -> None:
    for group in (GROUP, POPPERS):
        theirs, ours = (side.progress[group][0] for side in sides)
        offsets = [
            {
                queue: (at.broker_offset, at.consumer_offset, at.last_timestamp > 0)
                for queue, at in one.offset_table.items()
            }
            for one in (theirs, ours)
        ]
        assert offsets[0] == offsets[1]
        assert min(theirs.consume_tps, ours.consume_tps) > 0

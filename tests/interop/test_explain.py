"""Planted causes and four hundred healthy messages: `rmq explain` names the causes, with our servers and with Apache's.

The same scenes are planted in both at once. Each scene waits until its state is reached before `explain` runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rmqkit import (
    ConsumeLater,
    Message,
    MessageModel,
    MessageQueue,
    PopConsumer,
    Producer,
    PushConsumer,
    PushConsumerSettings,
    ReceivedMessage,
    Reject,
    SendResult,
    StartFrom,
)
from rmqkit.admin import Admin
from rmqkit.admin.diagnosis.causes import Cause, Explanation
from rmqkit.admin.explain import At, Explainer, Key
from rmqkit.broker.settings import BrokerSettings
from rmqkit.client.consumer.allocate import averagely
from rmqkit.errors import PeerRefused
from rmqkit.protocol import properties as prop
from rmqkit.protocol.codes import RequestCode as Code
from rmqkit.protocol.command import decode_header
from rmqkit.protocol.ids import UniqueKeys, decode_offset_id, offset_id
from rmqkit.protocol.names import TRANS_CHECK_MAX_TIME_TOPIC
from rmqkit.protocol.properties import encode_properties
from rmqkit.protocol.record import pack_host
from rmqkit.protocol.schemas.groups import GroupForbiddenRequest
from rmqkit.protocol.schemas.offsets import OffsetResponse, QueryConsumerOffsetRequest, UpdateConsumerOffsetRequest
from rmqkit.protocol.schemas.pop import MessageRequestMode
from rmqkit.protocol.schemas.send import EndTransactionRequest, SendMessageResponse, SendMessageV2Request
from rmqkit.protocol.schemas.topics import CreateTopicRequest
from rmqkit.standalone import Standalone
from rmqkit.store.settings import StoreSettings
from tests.interop.apache import BROKER_NAME, CLUSTER, open_store_with_apache
from tests.interop.kit import ApacheKit
from tests.interop.standalone import run_standalone
from tests.interop.suite.scene import quick_consumer
from tests.patience import TIMEOUT_MS, producing

HEALTHY_COUNT = 400
"""Every group consumes messages that are named in each way, retried and delayed."""
HEALTHY_QUEUES = 8
HEALTHY_GROUPS = ("takes_all", "takes_tags", "takes_sql", "takes_in_order")
SECONDS = 200
POLL_SECONDS = 0.05
PREPARED, HALF = 4, {prop.TRANSACTION_PREPARED: "true", prop.PRODUCER_GROUP: "explain_half"}
ROLLBACK = 12
HOUR_MS = 3_600_000
LOG_FILE_BYTES = 1 << 20
QUEUE_FILE_BYTES, SLOTS, ENTRIES = 6000, 1000, 20_000

# The first retry comes after a second, level 18 after two hours. Transactions are given up after ten checks. Op
# messages are written at once, as in `BROKER_CONF`: while one waits, a thread of Apache's broker uses a whole core.
CONF = {
    "recallMessageEnable": "true",
    "enablePropertyFilter": "true",
    "messageDelayLevel": " ".join(["1s"] * 17 + ["2h"]),
    "mappedFileSizeCommitLog": LOG_FILE_BYTES,
    "mappedFileSizeConsumeQueue": QUEUE_FILE_BYTES,
    "maxHashSlotNum": SLOTS,
    "maxIndexNum": ENTRIES,
    "transactionTimeOut": 1000,
    "transactionCheckInterval": 1000,
    "transactionCheckMax": 10,
    "transactionOpMsgMaxSize": 1,
    "waitTimeMillsInSendQueue": 60_000,
}


@dataclass
class Planted:
    """A missing message, and the reason why it was not consumed."""

    cause: Cause
    topic: str
    group: str
    message: str | Key | At


@dataclass
class Peer:
    """A running pair of servers, `ours` or `apache`, and clients that live as long as the scenes."""

    name: str
    namesrv: str
    address: str
    admin: Admin
    sender: Producer
    folder: Path
    clients: contextlib.AsyncExitStack
    never: asyncio.Event = field(default_factory=asyncio.Event)

    async def topic(self, name: str, *, queues: int = 1, read: int | None = None, perm: int = 6) -> str:
        header = CreateTopicRequest(name, "TBW102", queues if read is None else read, queues, perm, "SINGLE_TAG", 0)
        await self.admin.calls.ask(self.address, Code.UPDATE_AND_CREATE_TOPIC, header)
        await self.until(lambda: self.is_routed(name, perm), f"route of {name}")
        return name

    async def is_routed(self, topic: str, perm: int) -> bool:
        self.admin.calls.forget()
        with contextlib.suppress(Exception):
            return [data.perm for data in (await self.admin.calls.route(topic)).queue_datas] == [perm]
        return False

    async def group(self, name: str, **fields: Any) -> str:
        body = json.dumps({"groupName": name, **fields}).encode()
        await self.admin.calls.ask(self.address, Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=body)
        return name

    async def have_popped(self, group: str, topic: str) -> None:
        """Set the group's mode to POP, as an operator does (setConsumeMode)."""
        mode = MessageRequestMode(topic=topic, consumer_group=await self.group(group), mode="POP")
        await self.admin.calls.set_request_mode(self.address, mode)

    async def send(self, topic: str, body: str = "x", *, queue_id: int = 0, **fields: Any) -> SendResult:
        queue = MessageQueue(topic, BROKER_NAME, queue_id)
        return await self.sender.send(Message(topic=topic, body=body.encode(), **fields), queue=queue)

    async def consumer(
        self,
        group: str,
        topic: str,
        expression: str = "*",
        handler: Callable[[ReceivedMessage], Awaitable[None]] | None = None,
        *,
        expression_type: str = "TAG",
        allocate: Any = averagely,
        kind: type[PushConsumer] = PushConsumer,
        ordered: bool = False,
        **settings: Any,
    ) -> None:
        made = kind(
            group,
            self.namesrv,
            settings=PushConsumerSettings(
                **quick_consumer({"drain_ms": 0, "offsets_dir": str(self.folder), **settings})
            ),
            allocate=allocate,
            ordered=ordered,
        )
        made.subscribe(topic, expression, handler or consume, expression_type=expression_type)
        await self.clients.enter_async_context(made)

    async def commit(self, group: str, topic: str, offset: int, queue_id: int = 0) -> None:
        header = UpdateConsumerOffsetRequest(group, topic, queue_id, offset)
        await self.admin.calls.ask(self.address, Code.UPDATE_CONSUMER_OFFSET, header)

    async def raw(
        self, topic: str, *, age_ms: int, pairs: dict[str, str], sys_flag: int = 0
    ) -> tuple[str, SendMessageResponse]:
        """Send a message of a producer whose clock is slow, or that ignores transaction checks. Return its unique
        key.
        """
        unique_key, born_ms = new_key(self), self.admin.calls.clock.now_ms() - age_ms
        properties = encode_properties({**pairs, prop.UNIQ_KEY: unique_key}).decode()
        header = SendMessageV2Request("explain_half", topic, "TBW102", 4, 0, sys_flag, born_ms, 0, properties)
        answer = await self.admin.calls.ask(self.address, Code.SEND_MESSAGE_V2, header, body=b"raw")
        return unique_key, decode_header(answer, SendMessageResponse)

    async def half(self, topic: str, age_ms: int = 0) -> tuple[str, SendMessageResponse]:
        return await self.raw(topic, age_ms=age_ms, pairs=HALF, sys_flag=PREPARED)

    async def until(self, look: Callable[[], Awaitable[object]], what: str) -> None:
        try:
            async with asyncio.timeout(SECONDS):
                while not await look():
                    await asyncio.sleep(POLL_SECONDS)
        except TimeoutError:
            raise AssertionError(f"{self.name}: not within {SECONDS} s: {what}") from None

    async def passed(self, group: str, topic: str, offset: int = 0, queue_id: int = 0) -> None:
        """Wait until the broker's offset of a group is greater than an offset."""

        async def is_past() -> bool:
            header = QueryConsumerOffsetRequest(group, topic, queue_id, set_zero_if_not_found=False)
            with contextlib.suppress(PeerRefused):
                code = Code.QUERY_CONSUMER_OFFSET
                return (await self.admin.calls.fetch_header(OffsetResponse, self.address, code, header)).offset > offset
            return False

        await self.until(is_past, f"{group} past {offset} of {topic}")

    async def online(self, group: str, count: int = 1) -> None:
        async def is_online() -> bool:
            with contextlib.suppress(PeerRefused):
                return len((await self.admin.clients.consumers(group)).connection_set) == count
            return False

        await self.until(is_online, f"{count} of {group} online")


async def consume(message: ReceivedMessage) -> None:
    """Consume a message successfully."""


def new_key(peer: Peer) -> str:
    keys = UniqueKeys(pack_host("127.0.0.1", 0)[:4], 4321, random.getrandbits(32))
    return keys.next(peer.admin.calls.clock.now_ms())


# -- the scenes


async def filtered_by_tag(peer: Peer) -> Planted:
    topic = await peer.topic("ByTag")
    await peer.consumer("by_tag", topic, "A || C")
    sent = await peer.send(topic, tags="B")
    await peer.passed("by_tag", topic)
    return Planted(Cause.FILTERED_BY_TAG, topic, "by_tag", sent.msg_id)


async def filtered_by_sql92(peer: Peer) -> Planted:
    topic = await peer.topic("BySql")
    await peer.consumer("by_sql", topic, "amount > 100 AND region = 'EU'", expression_type="SQL92")
    sent = await peer.send(topic, properties={"amount": "99", "region": "EU"})
    await peer.passed("by_sql", topic)
    return Planted(Cause.FILTERED_BY_SQL92, topic, "by_sql", sent.offset_msg_id)


async def subscriptions_differ(peer: Peer) -> Planted:
    topic = await peer.topic("Differ", queues=2)
    await peer.consumer("differ", topic, "A")
    await peer.consumer("differ", topic, "B")
    await peer.online("differ", 2)
    sent = [await peer.send(topic, tags=tag, queue_id=queue_id) for tag in "AB" for queue_id in (0, 1)]
    await peer.passed("differ", topic, 1)
    return Planted(Cause.SUBSCRIPTIONS_DIFFER, topic, "differ", sent[0].msg_id)


async def not_subscribed(peer: Peer) -> Planted:
    topic = await peer.topic("NotSubscribed")
    await peer.consumer("elsewhere", await peer.topic("Elsewhere"))
    await peer.online("elsewhere")
    return Planted(Cause.NOT_SUBSCRIBED, topic, "elsewhere", (await peer.send(topic)).msg_id)


async def no_consumer_online(peer: Peer) -> Planted:
    topic = await peer.topic("Offline")
    await peer.group("offline")
    await peer.send(topic, keys=["order-1", "order-2"])
    await peer.commit("offline", topic, 0)
    return Planted(Cause.NO_CONSUMER_ONLINE, topic, "offline", Key("order-2"))


async def group_unknown(peer: Peer) -> Planted:
    topic = await peer.topic("Unknown")
    return Planted(Cause.GROUP_UNKNOWN, topic, "never_seen", (await peer.send(topic)).offset_msg_id)


async def group_disabled(peer: Peer) -> Planted:
    topic = await peer.topic("Disabled")
    await peer.group("disabled", consumeEnable=False)
    await peer.consumer("disabled", topic)
    return Planted(Cause.GROUP_DISABLED, topic, "disabled", (await peer.send(topic)).msg_id)


async def read_forbidden(peer: Peer) -> Planted:
    topic = await peer.topic("Forbidden")
    await peer.group("forbidden")
    header = GroupForbiddenRequest("forbidden", topic, readable=False)
    await peer.admin.calls.ask(peer.address, Code.UPDATE_AND_GET_GROUP_FORBIDDEN, header)
    await peer.consumer("forbidden", topic)
    return Planted(Cause.READ_FORBIDDEN, topic, "forbidden", (await peer.send(topic)).msg_id)


async def broadcasting(peer: Peer) -> Planted:
    topic = await peer.topic("Broadcast")
    sent = await peer.send(topic)
    mode, start = MessageModel.BROADCASTING, StartFrom.LAST_OFFSET
    await peer.consumer("broadcast", topic, message_model=mode, start_from=start)
    await peer.online("broadcast")
    return Planted(Cause.BROADCASTING, topic, "broadcast", sent.msg_id)


async def broadcast_forbidden(peer: Peer) -> Planted:
    topic = await peer.topic("NoBroadcast")
    await peer.group("no_broadcast", consumeBroadcastEnable=False)
    await peer.consumer("no_broadcast", topic, message_model=MessageModel.BROADCASTING)
    await peer.online("no_broadcast")
    return Planted(Cause.BROADCAST_FORBIDDEN, topic, "no_broadcast", (await peer.send(topic)).msg_id)


async def topic_not_readable(peer: Peer) -> Planted:
    topic = await peer.topic("WriteOnly", perm=2)
    await peer.consumer("write_only", topic)
    sent = await peer.send(topic)
    await peer.online("write_only")
    return Planted(Cause.TOPIC_NOT_READABLE, topic, "write_only", At(0, sent.queue_offset))


async def queue_not_read(peer: Peer) -> Planted:
    topic = await peer.topic("Shrunk", queues=2, read=1)
    await peer.consumer("shrunk", topic)
    sent = await peer.send(topic, queue_id=1)
    await peer.online("shrunk")
    return Planted(Cause.QUEUE_NOT_READ, topic, "shrunk", sent.msg_id)


async def no_owner(peer: Peer) -> Planted:
    topic = await peer.topic("Unowned", queues=2)
    await peer.consumer("unowned", topic, allocate=lambda queues, ids, own: [one for one in queues if not one.queue_id])
    sent = [await peer.send(topic, queue_id=queue_id) for queue_id in (0, 1)]
    await peer.passed("unowned", topic)
    return Planted(Cause.NO_OWNER, topic, "unowned", sent[1].msg_id)


async def waiting(peer: Peer) -> Planted:
    topic = await peer.topic("Stuck")
    called = asyncio.Event()

    async def hang(message: ReceivedMessage) -> None:
        called.set()
        await peer.never.wait()

    await peer.consumer("stuck", topic, handler=hang)
    sent = [await peer.send(topic) for _ in range(3)]
    await called.wait()
    return Planted(Cause.WAITING, topic, "stuck", sent[2].msg_id)


async def skipped(peer: Peer) -> Planted:
    topic = await peer.topic("Skipped")
    await peer.group("skipped")
    sent = [await peer.send(topic) for _ in range(5)]
    await peer.commit("skipped", topic, 5)
    return Planted(Cause.SKIPPED, topic, "skipped", sent[2].msg_id)


async def retry_scheduled(peer: Peer) -> Planted:
    topic = await peer.topic("Retried")

    async def fail(message: ReceivedMessage) -> None:
        raise ConsumeLater(18)

    await peer.consumer("retried", topic, handler=fail)
    sent = await peer.send(topic)
    await peer.passed("retried", topic)
    return Planted(Cause.RETRYING, topic, "retried", sent.msg_id)


async def retry_due(peer: Peer) -> Planted:
    topic = await peer.topic("RetryDue")
    called = asyncio.Event()

    async def fail_and_hang(message: ReceivedMessage) -> None:
        if not message.reconsume_times:
            raise ConsumeLater(1)
        called.set()
        await peer.never.wait()

    await peer.consumer("retry_due", topic, handler=fail_and_hang)
    sent = await peer.send(topic)
    await called.wait()
    return Planted(Cause.RETRYING, topic, "retry_due", sent.offset_msg_id)


async def dead_letter(peer: Peer) -> Planted:
    topic = await peer.topic("Dead")

    async def reject(message: ReceivedMessage) -> None:
        raise Reject("no such customer")

    await peer.consumer("dead", topic, handler=reject)
    sent = await peer.send(topic)
    await peer.passed("dead", topic)
    return Planted(Cause.DEAD_LETTER, topic, "dead", sent.msg_id)


async def delayed(peer: Peer) -> Planted:
    topic = await peer.topic("Delayed")
    await peer.consumer("delayed", topic)
    return Planted(Cause.DELAYED, topic, "delayed", (await peer.send(topic, delay_level=18)).msg_id)


async def transaction_pending(peer: Peer) -> Planted:
    topic = await peer.topic("Pending")
    unique_key, _ = await peer.half(topic)
    return Planted(Cause.TRANSACTION_PENDING, topic, "pending", unique_key)


async def rolled_back(peer: Peer) -> Planted:
    topic = await peer.topic("RolledBack")
    unique_key, sent = await peer.half(topic)
    header = EndTransactionRequest(
        producer_group="explain_half",
        tran_state_table_offset=sent.queue_offset,
        commit_log_offset=decode_offset_id(sent.msg_id)[2],
        commit_or_rollback=ROLLBACK,
        msg_id=unique_key,
        transaction_id=unique_key,
    )
    await peer.admin.calls.ask(peer.address, Code.END_TRANSACTION, header)
    explainer = Explainer(peer.admin, topic, "rolled_back")

    async def is_recorded() -> bool:
        return (await explainer.explain(unique_key)).cause is not Cause.TRANSACTION_PENDING

    await peer.until(is_recorded, "the op record of a rollback")
    return Planted(Cause.ROLLED_BACK, topic, "rolled_back", unique_key)


async def given_up(peer: Peer, *, age_ms: int = 0) -> Planted:
    topic = await peer.topic("TooOld" if age_ms else "GivenUp")
    unique_key, _ = await peer.half(topic, age_ms)

    async def is_given_up() -> object:
        brokers = {BROKER_NAME: peer.address}
        return await peer.admin.messages.by_key(TRANS_CHECK_MAX_TIME_TOPIC, unique_key, is_unique=True, brokers=brokers)

    await peer.until(is_given_up, "the end of a transaction nobody knows of")
    return Planted(Cause.CLOCK_SKEW if age_ms else Cause.GIVEN_UP, topic, "given_up", unique_key)


async def clock_skew(peer: Peer) -> Planted:
    return await given_up(peer, age_ms=200 * HOUR_MS)


async def expired(peer: Peer) -> Planted:
    return Planted(Cause.EXPIRED, "Expired", "expired", At(0, 0))


async def expired_id(peer: Peer) -> Planted:
    host, _, port = peer.address.partition(":")
    return Planted(Cause.EXPIRED, "Expired", "expired", offset_id(pack_host(host, int(port)), 0))


async def wrong_kind_of_id(peer: Peer) -> Planted:
    topic = await peer.topic("Keys")
    await peer.send(topic, keys=["order-77"])
    return Planted(Cause.WRONG_KIND_OF_ID, topic, "keys", "order-77")


async def not_stored(peer: Peer) -> Planted:
    return Planted(Cause.NOT_STORED, await peer.topic("NotStored"), "not_stored", new_key(peer))


async def not_stored_yet(peer: Peer) -> Planted:
    return Planted(Cause.NOT_STORED, await peer.topic("NotYet"), "not_stored", At(0, 7))


async def not_in_cluster(peer: Peer) -> Planted:
    topic = await peer.topic("OtherCluster")
    return Planted(Cause.NOT_IN_CLUSTER, topic, "any", offset_id(pack_host("10.9.8.7", 10911), 4711))


async def wrong_topic(peer: Peer) -> Planted:
    sent = await peer.send(await peer.topic("RightTopic"))
    return Planted(Cause.WRONG_TOPIC, await peer.topic("WrongTopic"), "any", sent.msg_id)


async def timed(peer: Peer) -> Planted:
    topic = await peer.topic("Timed")
    return Planted(Cause.DELAYED, topic, "timed", (await peer.send(topic, delay=HOUR_MS / 1000)).msg_id)


async def timed_by_a_fast_clock(peer: Peer) -> Planted:
    """Send a message that is due now by a clock that is an hour fast."""
    topic = await peer.topic("FastClock")
    theirs_ms = str(peer.admin.calls.clock.now_ms() + HOUR_MS)
    unique_key, _ = await peer.raw(topic, age_ms=-HOUR_MS, pairs={prop.TIMER_DELIVER_MS: theirs_ms})
    return Planted(Cause.CLOCK_SKEW, topic, "timed", unique_key)


async def recalled(peer: Peer) -> Planted:
    topic = await peer.topic("Recalled")
    sent = await peer.send(topic, delay=HOUR_MS / 1000)
    assert sent.recall_handle is not None
    await peer.sender.recall(sent.recall_handle)
    return Planted(Cause.RECALLED, topic, "timed", sent.msg_id)


async def popped(peer: Peer) -> Planted:
    topic = await peer.topic("Popped")
    called = asyncio.Event()

    async def hang(message: ReceivedMessage) -> None:
        called.set()
        await peer.never.wait()

    await peer.have_popped("popped", topic)
    await peer.consumer("popped", topic, handler=hang, kind=PopConsumer)
    sent = await peer.send(topic)
    await called.wait()
    return Planted(Cause.POPPED, topic, "popped", sent.msg_id)


async def popped_and_acknowledged(peer: Peer) -> Planted:
    topic = await peer.topic("Acknowledged")
    handled = asyncio.Event()

    async def handle(message: ReceivedMessage) -> None:
        handled.set()

    await peer.have_popped("acknowledged", topic)
    await peer.consumer("acknowledged", topic, handler=handle, kind=PopConsumer)
    sent = await peer.send(topic)
    await handled.wait()
    return Planted(Cause.CONSUMED, topic, "acknowledged", sent.msg_id)


SCENES = (
    *(filtered_by_tag, filtered_by_sql92, subscriptions_differ, not_subscribed, no_consumer_online, group_unknown),
    *(group_disabled, read_forbidden, broadcasting, broadcast_forbidden, topic_not_readable, queue_not_read, no_owner),
    *(waiting, skipped, retry_scheduled, retry_due, dead_letter, delayed, rolled_back, given_up),
    *(timed, timed_by_a_fast_clock, recalled, popped, popped_and_acknowledged),
    *(clock_skew, expired, expired_id, wrong_kind_of_id, not_stored, not_stored_yet, not_in_cluster, wrong_topic),
)


# -- healthy messages


async def healthy(peer: Peer) -> dict[str, list[str | Key | At]]:
    """Return group → messages that it consumed, some on a retry and some delayed, named in every way in turn."""
    topic = await peer.topic("Healthy", queues=HEALTHY_QUEUES)
    consumed: dict[str, set[str]] = {group: set() for group in HEALTHY_GROUPS}

    def taking(group: str) -> Callable[[ReceivedMessage], Awaitable[None]]:
        failed: set[str] = set()

        async def take(message: ReceivedMessage) -> None:
            if message.properties["number"].endswith("7") and message.msg_id not in failed:
                failed.add(message.msg_id)
                raise ConsumeLater(1)
            consumed[group].add(message.msg_id)

        return take

    await peer.consumer("takes_all", topic, "*", taking("takes_all"))
    await peer.consumer("takes_tags", topic, "A || B", taking("takes_tags"))
    await peer.consumer("takes_sql", topic, "number >= 0", taking("takes_sql"), expression_type="SQL92")
    await peer.consumer("takes_in_order", topic, "*", taking("takes_in_order"), ordered=True, suspend_queue_ms=10)
    named: dict[str, list[str | Key | At]] = {group: [] for group in HEALTHY_GROUPS}

    async def send(number: int) -> None:
        group = HEALTHY_GROUPS[number % len(HEALTHY_GROUPS)]
        tags = "AB"[number % 2] if group == "takes_tags" else None
        delay_level = int(number % 25 == 0)
        sent = await peer.send(
            *(topic, f"message {number}"),
            queue_id=number % HEALTHY_QUEUES,
            tags=tags,
            keys=[f"key-{number}", "all"],
            properties={"number": str(number)},
            delay_level=delay_level,
        )
        wanted[group].add(sent.msg_id)
        key = Key(f"key-{number}")
        at = key if delay_level else At(sent.queue.queue_id, sent.queue_offset)  # the message is not in its queue yet
        named[group].append((sent.msg_id, sent.offset_msg_id, key, at)[number // len(HEALTHY_GROUPS) % 4])

    wanted: dict[str, set[str]] = {group: set() for group in HEALTHY_GROUPS}
    await asyncio.gather(*map(send, range(HEALTHY_COUNT)))

    async def are_consumed() -> bool:
        return all(wanted[group] <= consumed[group] for group in HEALTHY_GROUPS)

    await peer.until(are_consumed, "the consumption of healthy messages")
    return named


# -- both servers


@dataclass
class Told:
    """The explanations at one peer."""

    planted: list[tuple[Planted, Explanation]]
    healthy: list[Explanation]


async def ask_all(peer: Peer) -> Told:
    planted, named = await asyncio.gather(asyncio.gather(*(scene(peer) for scene in SCENES)), healthy(peer))
    planted.append(await transaction_pending(peer))  # the transaction is given up after ten seconds
    peer.admin.calls.forget()
    causes = [await Explainer(peer.admin, one.topic, one.group).explain(one.message) for one in reversed(planted)]
    permits = asyncio.Semaphore(16)

    async def explain(explainer: Explainer, message: str | Key | At) -> Explanation:
        async with permits:
            return await explainer.explain(message)

    well: list[Explanation] = []
    for group, messages in named.items():
        explainer = Explainer(peer.admin, "Healthy", group)
        well += await asyncio.gather(*(explain(explainer, message) for message in messages))
    return Told(list(zip(planted, reversed(causes), strict=True)), well)


@contextlib.asynccontextmanager
async def connected(name: str, namesrv: str, address: str, folder: Path) -> AsyncIterator[Peer]:
    async with (
        Admin(namesrv, timeout_ms=TIMEOUT_MS) as admin,
        Producer("explain", namesrv, settings=producing()) as sender,
        contextlib.AsyncExitStack() as clients,
    ):
        yield Peer(name, namesrv, address, admin, sender, folder, clients)


async def store_that_lost_its_beginning(root: Path) -> None:
    """Write a store whose first log file expired, with a topic that had messages in it."""
    broker = BrokerSettings(listen_port=0, bind_address="127.0.0.1", broker_name=BROKER_NAME, cluster_name=CLUSTER)
    store = StoreSettings(
        commit_log_file_bytes=LOG_FILE_BYTES,
        consume_queue_file_bytes=QUEUE_FILE_BYTES,
        hash_slot_count=SLOTS,
        index_entry_count=ENTRIES,
    )
    async with Standalone(root, broker=broker, store=store) as servers, contextlib.AsyncExitStack() as clients:
        producer = await clients.enter_async_context(Producer("expired", servers.namesrv_address, settings=producing()))
        for _ in range(12):
            await producer.send(Message(topic="Expired", body=random.randbytes(150_000)))
    (root / "commitlog" / f"{0:020}").unlink()


@pytest.fixture(scope="module")
def told(apache_kit: ApacheKit, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Told]]:
    """Plant and explain everything at both peers at the same time."""
    folder = tmp_path_factory.mktemp("explain")
    for name in ("ours", "apache"):
        (folder / name).mkdir()
        asyncio.run(store_that_lost_its_beginning(folder / name / "store"))
    conf = folder / "ours" / "broker.conf"
    settings = {"brokerName": BROKER_NAME, "brokerClusterName": CLUSTER, **CONF}
    conf.write_text("".join(f"{key}={value}\n" for key, value in settings.items()))
    ours = run_standalone(folder / "ours" / "store", folder / "ours", "--config", str(conf))
    apache = open_store_with_apache(apache_kit, folder / "apache" / "store", folder / "apache", CONF)
    with apache as theirs, ours as own:

        async def run() -> dict[str, Told]:
            async with (
                connected("ours", own.namesrv_addr, own.broker_addr, folder / "ours") as first,
                connected("apache", theirs.namesrv_addr, theirs.broker_addr, folder / "apache") as second,
            ):
                told = await asyncio.gather(ask_all(first), ask_all(second))
                return dict(zip(("ours", "apache"), told, strict=True))

        yield asyncio.run(run())


@pytest.mark.parametrize("peer", ["ours", "apache"])
def test_planted_causes_are_named(told: dict[str, Told], peer: str) -> None:
    planted = told[peer].planted
    wrong = [
        f"{one.cause}, not {found.cause}: {found.sentence}" for one, found in planted if one.cause is not found.cause
    ]
    assert wrong == []
    assert len(planted) == len(SCENES) + 1
    assert all(found.evidence and found.remedy for _, found in planted)


@pytest.mark.parametrize("peer", ["ours", "apache"])
def test_healthy_messages_raise_no_alarm(told: dict[str, Told], peer: str) -> None:
    alarms = [found.sentence for found in told[peer].healthy if found.cause is not Cause.CONSUMED]
    assert len(told[peer].healthy) == HEALTHY_COUNT
    assert alarms == []

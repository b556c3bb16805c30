"""The flows of messages: receives, filters, handles, dead letters, delays, transactions."""

from __future__ import annotations

import asyncio
import gzip
import time

from tests.interop.grpc.raw_client import Answer, Client
from tests.interop.grpc.refusals import masked_offset
from tests.interop.grpc.scene import (
    BORN,
    OK,
    Scene,
    ack,
    case,
    change,
    consumer,
    kind,
    message,
    receive,
    send,
    status,
)

NOTHING = status(40401, "no new message")
TRIES_MAX = 12


async def come(client: Client, topic: str, group: str, *args: object, count: int = 1, **more: object) -> Answer:
    """Receive until ``count`` messages have arrived, and return them as one answer: brokers show messages, also due
    ones, with a delay.
    """
    answer = await receive(client, topic, group, *args, **more)
    for _ in range(TRIES_MAX):
        if len(answer.messages) >= count:
            break
        before = [item for item in answer.items if item.WhichOneof("content") == "message"]
        answer = await receive(client, topic, group, *args, **more)
        answer.items[1:1] = before
    return answer


@case({"plain": kind("NORMAL")}, {"G-plain": {}})
async def plain_message(scene: Scene) -> None:
    client = scene.client()
    await consumer(client, "plain", "G-plain")
    properties = {"a": "b", "c": "", "ä": "ö"}
    more = {"tag": "t", "keys": ["k1", "k2"], "trace_context": "00-ab", "message_type": 1, "queue_id": 9}
    scene.check(
        "sent", await send(client, "plain", properties=properties, **more), [*OK, "entries[0].transaction_id: 'ID1'"]
    )
    wanted = [*OK, "message.system_properties.body_digest.checksum: '5D41402ABC4B2A76B9719D911017C592'"]
    scene.check("received", await come(client, "plain", "G-plain"), wanted)
    sparse = {"topic": {"name": "plain"}, "body": b"x", "system_properties": {"message_id": "ID2"}}
    scene.check("sent with nothing", await client.ask("SendMessage", messages=[sparse]), OK)
    scene.check("received with nothing", await come(client, "plain", "G-plain"), OK)
    packed = gzip.compress(b"hello" * 100, mtime=0)
    await send(client, "plain", packed, "ID3", body_encoding=2)
    apache, ours = (f"message.system_properties.body_encoding: {encoding}" for encoding in ("GZIP", "IDENTITY"))
    why = "stored and handed out as clients of the other protocol can read it"
    scene.check("received gzip", await come(client, "plain", "G-plain"), [apache], ours=[ours], why=why)


@case({"stored-FIFO": kind("FIFO", 4)}, {"G-stored-FIFO": {"consume_message_orderly": True}})
async def in_order(scene: Scene) -> None:
    client = scene.client()
    await consumer(client, "stored-FIFO", "G-stored-FIFO", role=2)
    for group, queue in (("a", 0), ("mg", 2), ("hello", 3), ("order-2", 2), ("ä", 2)):
        scene.check(f"sent {group}", await send(client, "stored-FIFO", message_id=group, message_group=group), OK)
        first = await come(client, "stored-FIFO", "G-stored-FIFO", attempt_id=group)
        wanted = [f"message.system_properties.queue_id: {queue}"] if queue else [*OK]
        scene.check(f"received {group}", first, wanted)
        scene.check(
            f"acked {group}", await ack(client, "stored-FIFO", "G-stored-FIFO", *first.handles, message_id=group), OK
        )
    await send(client, "stored-FIFO", b"1", "ID1", message_group="a")
    await send(client, "stored-FIFO", b"2", "ID2", message_group="a")
    first = await come(client, "stored-FIFO", "G-stored-FIFO", attempt_id="one", batch_size=1)
    scene.check("first of two", first, OK)
    same = await receive(client, "stored-FIFO", "G-stored-FIFO", attempt_id="one", batch_size=1)
    scene.check("same attempt", same, OK)
    scene.check("other attempt", await receive(client, "stored-FIFO", "G-stored-FIFO", attempt_id="two"), NOTHING)
    scene.check("acked first", await ack(client, "stored-FIFO", "G-stored-FIFO", *same.handles), OK)
    second = await come(client, "stored-FIFO", "G-stored-FIFO", attempt_id="two")
    scene.check("second of two", second, ["message.body: b'2'"])
    changed = await change(client, "stored-FIFO", "G-stored-FIFO", second.handles[0], 1, "ID2")
    for item in changed.items:  # the value depends on the time since the pop
        item.receipt_handle = " ".join(
            "0" if at == 2 else word for at, word in enumerate(item.receipt_handle.split(" "))
        )
    scene.check("changed", changed, OK)
    again = await come(client, "stored-FIFO", "G-stored-FIFO", attempt_id="three")
    scene.check("again", again, ["message.system_properties.delivery_attempt: 2"])


@case({"many": kind("NORMAL")}, {"G-many": {}})
async def batches(scene: Scene) -> None:
    client = scene.client()
    await consumer(client, "many", "G-many")
    scene.check("nothing to receive", await receive(client, "many", "G-many", long_polling_timeout={}), NOTHING)
    for number in range(40):
        await send(client, "many", b"%d" % number, f"ID{number}")
    # It waits long enough for all other messages to be visible.
    scene.check("0 wanted", await receive(client, "many", "G-many", batch_size=0), NOTHING)
    for size, expected in ((1, 1), (3, 3), (50, 32)):
        answer = await come(client, "many", "G-many", batch_size=size)
        assert len(answer.messages) == expected, f"{len(answer.messages)} of {size} wanted"
        scene.check(f"{size} wanted", answer, OK)
    scene.check("all the others", await come(client, "many", "G-many", count=4), OK)
    three = [message("many", b"%d" % number, f"B{number}") for number in range(3)]
    why = "an entry for each message"
    answer = await client.ask("SendMessage", messages=three)
    scene.check(
        "three sent", answer, [*OK, "entries[0].status.code: OK"], ours=[*OK, "entries[2].message_id: 'B2'"], why=why
    )
    scene.check(
        "three received", await come(client, "many", "G-many", count=3), ["message.system_properties.message_id: 'B2'"]
    )


@case({"batch-delay": kind("DELAY"), "batch-transaction": kind("TRANSACTION")})
async def batches_refused(scene: Scene) -> None:
    """Leave out the two delayed messages for Apache's broker: they would stop its timer for ever."""
    client = scene.client()
    two = [message("batch-transaction", message_id=f"ID{number}", message_type=4) for number in range(2)]
    why = "a batch holds plain messages only"
    answer = await client.ask("SendMessage", messages=two)
    scene.check(
        "transactions", answer, ["status.code: INTERNAL_SERVER_ERROR"], ours=["status.code: BAD_REQUEST"], why=why
    )


@case({"filtered": kind("NORMAL")}, {f"G-filtered-{at}": {} for at in range(6)})
async def filters(scene: Scene) -> None:
    client = scene.client()
    found = {("*", 1): 4, ("a || b", 1): 2, ("", 1): 4, ("a = '2' OR TAGS = 'c'", 2): 1, ("x", 1): 0, ("*", 0): 4}
    rows = list(found)
    clients = [scene.client(f"filters {at}") for at in range(len(rows))]
    for at, (expression, kind_) in enumerate(rows):
        await consumer(clients[at], "filtered", f"G-filtered-{at}", expression, kind_)
    for number, tag in enumerate(("a", "b", "c", "d")):
        await send(client, "filtered", b"%d" % number, f"ID{number}", tag=tag, properties={"a": str(number % 3)})

    async def one(at: int, expression: str, kind_: int) -> None:
        answer = await come(
            clients[at], "filtered", f"G-filtered-{at}", expression, kind_, count=found[expression, kind_]
        )
        scene.check(f"{at} {expression or 'blank'}", answer)

    await asyncio.gather(*(one(at, *row) for at, row in enumerate(rows)))


@case({"held": kind("NORMAL")}, {"G-held": {}})
async def handles(scene: Scene) -> None:
    client = scene.client()
    await consumer(client, "held", "G-held")
    for number in range(3):
        await send(client, "held", b"%d" % number, f"ID{number}")
    answer = await come(client, "held", "G-held", batch_size=3, count=3)
    first, second, third = answer.handles
    scene.check("acked", await ack(client, "held", "G-held", first, message_id="ID0"), OK)
    scene.check("acked twice", await ack(client, "held", "G-held", first, message_id="ID0"), OK)
    mixed = await ack(
        client, "held", "G-held", second, first.replace(first.split(" ")[1], "1700000000000"), message_id="ID1"
    )
    scene.check("acked with an expired one", mixed, status(30000, "MULTIPLE_RESULTS"))
    scene.check("acked by an unknown group", await ack(client, "held", "G-held-unknown", first, message_id="ID0"), OK)
    short = await change(client, "held", "G-held", third, 1, "ID2")
    scene.check("changed", short, OK)
    again = await come(client, "held", "G-held")
    scene.check("came again", again, ["message.system_properties.delivery_attempt: 2"])
    scene.check("acked a retry", await ack(client, "held", "G-held", *again.handles, message_id="ID2"), OK)
    scene.check(
        "ack of the changed one",
        await ack(client, "held", "G-held", short.first.receipt_handle, message_id="ID2"),
        ["entries[0].status.code: INVALID_RECEIPT_HANDLE"],
    )


@case({"renewed": kind("NORMAL")}, {"G-renewed": {}})
async def renewals(scene: Scene) -> None:
    client = scene.client()
    await consumer(client, "renewed", "G-renewed", role=2)
    await send(client, "renewed")
    answer = await come(client, "renewed", "G-renewed", auto_renew=True, invisible_duration={"seconds": 1})
    scene.check("received", answer, ["message.system_properties.receipt_handle: …<ms> 60000 …"])
    scene.check("terminated", await client.ask("NotifyClientTermination", group={"name": "G-renewed"}), OK)
    other = scene.client("renewals, another")
    await consumer(other, "renewed", "G-renewed", role=2)
    again = await come(other, "renewed", "G-renewed", auto_renew=True)
    scene.check("released", again, ["message.system_properties.delivery_attempt: 2"])


@case({"unset": kind("NORMAL")}, {"G-unset": {}})
async def without_settings(scene: Scene) -> None:
    client = scene.client()
    await send(client, "unset")
    answer = await receive(client, "unset", "G-unset")
    why = "the group's configuration stands in"
    scene.check("received", answer, ["status.code: INTERNAL_SERVER_ERROR"], ours=OK, why=why)


@case({"failing": kind("NORMAL")}, {"G-failing": {"retry_max_times": 1}, "G-dead": {}})
async def dead_letters(scene: Scene) -> None:
    client, reader = scene.client(), scene.client("dead letters")
    await consumer(client, "failing", "G-failing", role=2)
    await send(client, "failing", properties={"a": "b"}, tag="t")
    for attempt in (1, 2):
        answer = await come(client, "failing", "G-failing")
        scene.check(f"attempt {attempt}", answer, [f"message.system_properties.delivery_attempt: {attempt}"])
        await change(client, "failing", "G-failing", answer.handles[0], 0)
    for _ in range(TRIES_MAX):
        answer = await receive(client, "failing", "G-failing")
        if answer.first.status.message != "no new message":
            break
    scene.check("attempt 3", answer, status(40401, "no match message"))
    await consumer(reader, "%DLQ%G-failing", "G-dead")
    scene.check("dead", await come(reader, "%DLQ%G-failing", "G-dead"), OK)


@case({"forwarded": kind("NORMAL")}, {"G-forwarded": {}, "G-forwarded-dead": {}})
async def forwarding(scene: Scene) -> None:
    client, reader = scene.client(), scene.client("forwarded letters")
    await consumer(client, "forwarded", "G-forwarded", role=2)
    await send(client, "forwarded", properties={"a": "b"}, keys=["k"])
    answer = await come(client, "forwarded", "G-forwarded")
    fields = {"group": {"name": "G-forwarded"}, "topic": {"name": "forwarded"}, "message_id": "ID1"}
    counts = {"delivery_attempt": 1, "max_delivery_attempts": 17}
    ask = client.ask("ForwardMessageToDeadLetterQueue", receipt_handle=answer.handles[0], **fields, **counts)
    scene.check("forwarded", await ask, status(20000, "0"))
    await consumer(reader, "%DLQ%G-forwarded", "G-forwarded-dead")
    scene.check("dead", await come(reader, "%DLQ%G-forwarded", "G-forwarded-dead"), OK)
    route = await client.ask("QueryRoute", topic={"name": "%DLQ%G-forwarded"}, endpoints=scene.own_address)
    scene.check("route", route, OK)


@case({"timed": kind("DELAY")}, {"G-timed": {}})
async def delays(scene: Scene) -> None:
    client = scene.client()
    await consumer(client, "timed", "G-timed")
    scene.check("past", await send(client, "timed", b"past", delivery_timestamp={"seconds": 1_700_000_000}), OK)
    scene.check("past received", await come(client, "timed", "G-timed"), ["message.body: b'past'"])
    soon = {"seconds": int(time.time()) + 3}
    sent = await send(client, "timed", b"soon", "ID2", delivery_timestamp=soon)
    scene.check("soon", masked_offset(sent), [*OK, "entries[0].recall_handle: 'v1 timed broker-a <ms> ID2'"])
    late = {"seconds": int(time.time()) + 3600}
    handle = (
        masked_offset(await send(client, "timed", b"late", "ID3", delivery_timestamp=late))
        .first.entries[0]
        .recall_handle
    )
    scene.check(
        "soon received", await come(client, "timed", "G-timed"), ["message.system_properties.message_type: DELAY"]
    )
    for which in ("recalled", "recalled again"):
        answer = await client.ask("RecallMessage", topic={"name": "timed"}, recall_handle=handle)
        scene.check(which, answer, [*OK, "message_id: 'ID3'"])
    answer = await client.ask("RecallMessage", topic={"name": "recalled-from"}, recall_handle=handle)
    scene.check("recall at another topic", answer, status(50001, "recall failed, topic not match"))
    answer = await client.ask(
        "RecallMessage", topic={"name": "timed"}, recall_handle=sent.first.entries[0].recall_handle
    )
    scene.check("recall when delivered", answer, status(50001, "recall failed, timestamp invalid"))


@case({"ranked": kind("PRIORITY", 4)}, {"G-ranked": {}})
async def priorities(scene: Scene) -> None:
    client = scene.client()
    await consumer(client, "ranked", "G-ranked")
    for priority in (0, 2, 9):
        answer = await send(client, "ranked", b"%d" % priority, f"ID{priority}", priority=priority)
        scene.check(f"sent {priority}", answer, OK)
    answer = await come(client, "ranked", "G-ranked", count=3)
    # Messages that are stored at once are received from the highest priority on. The last one may arrive alone.
    answer.items[1:-1] = sorted(answer.items[1:-1], key=lambda item: item.message.body)
    scene.check("received", answer, ["message.system_properties.priority: 9"])


@case({"half": kind("TRANSACTION")}, {"G-half": {}})
async def transactions(scene: Scene) -> None:
    client, reader = scene.client(), scene.client("transactions, reader")
    await consumer(reader, "half", "G-half")
    stream = client.telemetry()
    await stream.ask(settings={"client_type": 1, "publishing": {"topics": [{"name": "half"}]}})

    async def end(name: str, resolution: int, source: int = 1) -> Answer:
        ids = {"message_id": name, "transaction_id": name, "resolution": resolution, "source": source}
        return await client.ask("EndTransaction", topic={"name": "half"}, **ids)

    # A half message that was born long ago is no longer checked.
    born = {"seconds": int(time.time())}
    immune = {"orphaned_transaction_recovery_duration": {"seconds": 600}, "born_timestamp": born}
    for name, resolution in (("commit", 1), ("rollback", 2)):
        answer = await send(client, "half", name.encode(), name, message_type=4, tag="t", **immune)
        scene.check(f"sent for {name}", masked_offset(answer), [*OK, f"entries[0].transaction_id: '{name}'"])
        scene.check(name, await end(name, resolution), OK)
    scene.check("received", await come(reader, "half", "G-half"), ["message.body: b'commit'"])
    why = "the end of the same kind is taken again"
    text = "status.message: 'cannot found transaction data'"
    scene.check("commit again", await end("commit", 1), [text], ours=OK, why=why)
    await send(client, "half", b"asked", "asked", message_type=4, properties={"a": "b"}, born_timestamp=born)
    command = await stream.next()
    for item in command.items:
        item.recover_orphaned_transaction_command.message.system_properties.queue_offset = 0
    wanted = ["recover_orphaned_transaction_command.transaction_id: 'asked'"]
    scene.check("asked", command, wanted)
    scene.check("commit when asked", await end("asked", 1, 2), OK)
    scene.check("received when asked", await come(reader, "half", "G-half"), ["message.body: b'asked'"])
    await send(client, "half", b"old", "old", message_type=4, **{**immune, "born_timestamp": BORN})
    # Its time is over. The call does not wait for the broker's answer.
    scene.check("commit of one born long ago", await end("old", 1), OK)
    soon = {"seconds": int(time.time()) + 60}
    answer = await send(client, "half", message_id="both", message_type=4, delivery_timestamp=soon)
    why = "a message is either of the two"
    scene.check("with a delay", answer, OK, ours=["status.code: MESSAGE_PROPERTY_CONFLICT_WITH_TYPE"], why=why)

"""Input that no SDK sends: numbers out of range, enums of a later version, invalid bytes, and streams."""

from __future__ import annotations

import time

from tests.interop.grpc.flows import come
from tests.interop.grpc.raw_client import Answer
from tests.interop.grpc.refusals import masked_offset
from tests.interop.grpc.scene import (
    BROKER,
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

UNKNOWN = 99
INT64_MAX = 2**63 - 1
OUT_OF_RANGE = "a number out of its range is the caller's error"
# A time, and the codes where they differ: of a delivery, of a birth and of a transaction's recovery, Apache's and ours.
TIMES: dict[str, tuple[dict[str, int], dict[str, tuple[int, int]]]] = {
    "negative": ({"seconds": -1}, {"delivery": (20000, 40012)}),
    "far": ({"seconds": 253_402_300_800}, {"delivery": (50001, 40012)}),
    "farthest": (
        {"seconds": INT64_MAX},
        {"delivery": (50001, 40012), "born": (20000, 40000), "recovery": (50001, 40000)},
    ),
    "least": (
        {"seconds": -INT64_MAX},
        {"delivery": (50001, 40012), "born": (20000, 40000), "recovery": (50001, 40000)},
    ),
    "too many nanos": (
        {"seconds": 1_700_000_000, "nanos": 2**31 - 1},
        {"delivery": (50001, 40012), "born": (20000, 40000), "recovery": (50001, 40000)},
    ),
    "negative nanos": (
        {"seconds": 1_700_000_000, "nanos": -1},
        {"delivery": (50001, 40012), "born": (20000, 40000), "recovery": (50001, 40000)},
    ),
}


@case(
    {
        "odd-normal": kind("NORMAL"),
        "odd-delay": kind("DELAY"),
        "odd-transaction": kind("TRANSACTION"),
        "odd-priority": kind("PRIORITY", 2),
    }
)
async def odd_sends(scene: Scene) -> None:
    client = scene.client()
    for label, (when, codes) in TIMES.items():
        for what, topic, fields in (
            ("delivery", "odd-delay", {"delivery_timestamp": when}),
            ("born", "odd-normal", {"born_timestamp": when}),
            ("recovery", "odd-transaction", {"orphaned_transaction_recovery_duration": when, "message_type": 4}),
        ):
            answer = masked_offset(await send(client, topic, message_id=f"{what} {label}", **fields))
            if what in codes:
                apache, ours = (status(code, "…") for code in codes[what])
                scene.check(f"{what} {label}", answer, apache, ours=ours, why=OUT_OF_RANGE)
            else:
                scene.check(f"{what} {label}", answer)
    for label, fields in {"type": {"message_type": UNKNOWN}, "encoding": {"body_encoding": UNKNOWN}}.items():
        scene.check(f"unknown {label}", masked_offset(await send(client, "odd-normal", message_id=label, **fields)), OK)
    for label, identity in {"long": "I" * 300, "of another alphabet": "ä ö", "empty words": "a,b;c"}.items():
        scene.check(f"id {label}", masked_offset(await send(client, "odd-normal", message_id=identity)), OK)
    for priority in (0, 2**31 - 1):
        answer = await send(client, "odd-priority", message_id=f"P{priority}", priority=priority)
        scene.check(f"priority {priority}", masked_offset(answer), OK)
    why = "an escaped null there"
    for name, code in {"%RETRY%G-odd": 20000, "%DLQ%G-odd": 40402}.items():
        answer = await send(client, name)
        scene.check(f"to {name}", answer, status(50001, "…"), ours=status(code, "…"), why=why)
    both = message("odd-normal", born_timestamp={}, born_host="")
    scene.check("no birth", masked_offset(await client.ask("SendMessage", messages=[both])), OK)


@case({"odd": kind("NORMAL")}, {"G-odd": {}})
async def odd_receives(scene: Scene) -> None:
    client = scene.client()
    await consumer(client, "odd", "G-odd")
    for number in range(3):
        await send(client, "odd", b"%d" % number, f"ID{number}")
    answer = await receive(client, "odd", "G-odd", batch_size=-1)
    scene.check(
        "negative batch", answer, status(50001, "…"), ours=status(40401, "no new message"), why="as a batch of 0"
    )
    answer = await receive(client, "odd", "G-odd", invisible_duration={"seconds": INT64_MAX})
    scene.check("most invisible", answer, status(50001, "…"), ours=status(40011, "…"), why=OUT_OF_RANGE)
    scene.check("largest batch", await come(client, "odd", "G-odd", batch_size=2**31 - 1, count=3), OK)
    for label, fields in {
        "negative invisible": {"invisible_duration": {"seconds": -1}},
        "negative polling": {"long_polling_timeout": {"seconds": -1}},
        "foreign broker": {"message_queue": {"topic": {"name": "odd"}, "broker": {"name": "zzz"}}},
        "odd queue": {"message_queue": {"topic": {"name": "odd"}, "broker": {"name": BROKER}, "id": -7}},
    }.items():
        scene.check(label, await receive(client, "odd", "G-odd", **fields))
    scene.check("unknown filter", await receive(client, "odd", "G-odd", "*", UNKNOWN))


@case({"odd-handles": kind("NORMAL", 2)}, {"G-odd-handles": {}})
async def odd_handles(scene: Scene) -> None:
    client = scene.client()
    await consumer(client, "odd-handles", "G-odd-handles")
    now = int(time.time() * 1000)
    good = f"0 {now} 60000 0 0 {BROKER} 0 0 0"
    rows = {
        "eight words": f"0 {now} 60000 0 0 {BROKER} 0 0",
        "ten words": f"0 {now} 60000 0 0 {BROKER} 0 0 0 0",
        "eleven words": f"{good} 0 0",
        "two blanks": good.replace(" ", "  "),
        "queue -1": f"0 {now} 60000 0 0 {BROKER} -1 0 0",
        "queue 9": f"0 {now} 60000 0 0 {BROKER} 9 0 0",
        "offset beyond": f"0 {now} 60000 0 0 {BROKER} 0 999 0",
        "negative offset": f"0 {now} 60000 0 0 {BROKER} 0 -1 0",
        "flag 9": f"0 {now} 60000 0 9 {BROKER} 0 0 0",
        "flag of retries": f"0 {now} 60000 0 1 {BROKER} 0 0 0",
        "revive queue 99": f"0 {now} 60000 99 0 {BROKER} 0 0 0",
        "beyond 64 bits": f"0 {now} 60000 0 0 {BROKER} 0 {2**64} 0",
        "long": good + "0" * 10_000,
    }
    refused = ("eleven words", "two blanks", "queue -1", "negative offset", "flag 9", "beyond 64 bits", "long")
    for label, handle in rows.items():
        acked = await ack(client, "odd-handles", "G-odd-handles", handle)
        changed = await change(client, "odd-handles", "G-odd-handles", handle, 10)
        if label in refused:
            why = "what no server made is refused"
            scene.check(f"ack: {label}", acked, ours=status(40013, "…"), why=why)
            scene.check(f"change: {label}", changed, ours=status(40013, "…"), why=why)
        else:
            scene.check(f"ack: {label}", acked)
            scene.check(f"change: {label}", changed)
    scene.check(
        "ack: 100 entries",
        await ack(client, "odd-handles", "G-odd-handles", *[f"0 1700000000000 10000 0 0 {BROKER} 0 0 0"] * 100),
    )
    scene.check(
        "change: no duration",
        await client.ask(
            "ChangeInvisibleDuration",
            topic={"name": "odd-handles"},
            group={"name": "G-odd-handles"},
            receipt_handle=rows["eight words"],
        ),
    )


@case({"streams": kind("NORMAL")}, {"G-streams": {}})
async def streams(scene: Scene) -> None:
    client = scene.client()
    subscription = {"group": {"name": "G-streams"}, "subscriptions": [{"topic": {"name": "streams"}}]}
    fields = {"client_type": 3, "subscription": subscription}
    first = client.telemetry()
    scene.check("settings", await first.ask(settings=fields), OK)
    await first.tell()  # an empty command gets no answer
    scene.check("settings after an empty command", await first.ask(settings=fields), OK)
    second = client.telemetry()
    scene.check("second stream", await second.ask(settings=fields), OK)
    scene.check("first stream still", await first.ask(settings=fields), OK)
    scene.check("termination", await client.ask("NotifyClientTermination", group={"name": "G-streams"}), OK)
    scene.check(
        "termination again",
        await client.ask("NotifyClientTermination", group={"name": "G-streams"}),
        status(40015, "cannot find client settings for this client"),
    )
    await second.half_close()
    scene.check("half-close after termination", await second.next(), ["grpc: the stream was completed"])
    scene.check("settings after termination", await first.ask(settings=fields), OK)
    silent = scene.client("silent").telemetry()
    await silent.half_close()
    scene.check("half-close of a silent one", await silent.next(), ["grpc: the stream was completed"])
    for label, command in {
        "trace": {"thread_stack_trace": {"nonce": "7"}},
        "verified": {"verify_message_result": {"nonce": "x"}},
    }.items():
        await first.tell(**command)
        scene.check(f"settings after an unasked {label}", await first.ask(settings=fields), OK)
    entry = {"topic": {"name": "streams"}, "expression": {"type": UNKNOWN, "expression": "*"}}
    odd = scene.client("streams, odd filter").telemetry()
    answer = await odd.ask(
        settings={**fields, "subscription": {"group": {"name": "G-streams"}, "subscriptions": [entry]}}
    )
    scene.check("unknown filter", answer)
    odd = scene.client("streams, odd type").telemetry()
    answer = await odd.ask(settings={**fields, "client_type": UNKNOWN})
    text = "grpc: INTERNAL process client telemetryCommand failed. Client type is not consumer, type: {}"
    ours = [text.format(UNKNOWN)]
    scene.check("unknown client type", answer, [text.format("UNRECOGNIZED")], ours=ours, why="the number says more")


@case()
async def no_message(scene: Scene) -> None:
    """Send bytes that are not a valid request."""
    for label, data in {
        "cut": b"\x0a\x7f",
        "wrong wire type": b"\x0f",
        "not UTF-8": b"\x0a\x04\x12\x02\xff\xfe",
    }.items():
        answer = await scene.client().ask_with_bytes("QueryRoute", data)
        code = answer.failure.split(" ")[0]
        assert code, f"{label} was read: {answer.items}"
        why = "the library's own"
        scene.check(label, Answer([], code), ["grpc: UNKNOWN"], ours=["grpc: INTERNAL"], why=why)

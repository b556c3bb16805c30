"""Calls that are refused or accepted because of their fields: the tables of the spec's sections 2 to 5 and 7."""

from __future__ import annotations

import time

from tests.interop.grpc.raw_client import METHODS, Answer
from tests.interop.grpc.scene import (
    ASKED_AT,
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

NO_ROUTE = (
    "CODE: 17  DESC: No topic route info in name server for the topic: {}\nFor more information, please visit the url, "
    "https://rocketmq.apache.org/docs/bestPractice/06FAQ"
)
ILLEGAL_CHARACTERS = "contains illegal characters, allowing only ^[%|a-zA-Z0-9_-]+$"
BAD_TOPICS = {
    "blank": (" ", "The specified topic is blank"),
    "none": ("", "The specified topic is blank"),
    "long": ("t" * 128, "The specified topic is longer than topic max length 127."),
    "character": ("a b", f"The specified topic[a b] {ILLEGAL_CHARACTERS}"),
    "not ASCII": ("ä", f"The specified topic[ä] {ILLEGAL_CHARACTERS}"),
    "system": ("TBW102", "cannot access system topic"),
}
BAD_GROUPS = {
    "blank": (" ", "the specified group is blank"),
    "long": ("g" * 121, f"the specified group[{'g' * 121}] is longer than group max length: 120."),
    "character": ("a b", f"the specified group[a b] {ILLEGAL_CHARACTERS}"),
    "system": ("CID_RMQ_SYS_x", "cannot use system consumer group"),
}
TYPES = ("NORMAL", "FIFO", "DELAY", "TRANSACTION", "PRIORITY", "MIXED", "UNSPECIFIED")


@case()
async def client_id_missing(scene: Scene) -> None:
    refused = status(40017, "client id cannot be empty")
    for label, client_id in (("missing", None), ("blank", " ")):
        client = scene.client(client_id)
        for method in METHODS.values():
            if method.name in UNIMPLEMENTED:
                continue
            if method.name == "Telemetry":
                stream = client.telemetry()
                scene.check(f"Telemetry {label}", await stream.ask(settings={"client_type": 1}), refused)
                scene.check(f"Telemetry {label}, then", await stream.next(), ["grpc: the stream was completed"])
            else:
                scene.check(f"{method.name} {label}", await client.ask(method.name), refused)


RESERVED = (
    *("TRACE_ON", "MSG_REGION", "KEYS", "TAGS", "WAIT", "DELAY", "RETRY_TOPIC", "REAL_TOPIC", "REAL_QID", "TRAN_MSG"),
    *("PGROUP", "MIN_OFFSET", "MAX_OFFSET", "BUYER_ID", "ORIGIN_MESSAGE_ID", "TRANSFER_FLAG", "CORRECTION_FLAG"),
    *("MQ2_FLAG", "RECONSUME_TIME", "UNIQ_KEY", "MAX_RECONSUME_TIMES", "CONSUME_START_TIME", "POP_CK", "POP_CK_OFFSET"),
    *("1ST_POP_TIME", "TRAN_PREPARED_QUEUE_OFFSET", "DUP_INFO", "EXTEND_UNIQ_INFO", "INSTANCE_ID", "CORRELATION_ID"),
    *("REPLY_TO_CLIENT", "TTL", "ARRIVE_TIME", "PUSH_REPLY_TIME", "CLUSTER", "MSG_TYPE", "INNER_MULTI_QUEUE_OFFSET"),
    *("TIMER_DELAY_MS", "TIMER_DELAY_SEC", "TIMER_DELIVER_MS", "TIMER_ENQUEUE_MS", "TIMER_DEQUEUE_MS", "ORIGIN_GROUP"),
    *("TIMER_ROLL_TIMES", "TIMER_OUT_MS", "TIMER_DEL_UNIQKEY", "TIMER_DELAY_LEVEL", "__BORNHOST", "BORN_TIMESTAMP"),
    *("DLQ_ORIGIN_TOPIC", "DLQ_ORIGIN_MESSAGE_ID", "__CRC32#", "_SYS_MSG_PRIORITY_"),
)
# Properties that clients may set although the broker uses each of them, and properties that change its behaviour.
OWN_TO_THE_BROKER = (
    *("TRACE_CONTEXT", "__transactionId__", "CHECK_IMMUNITY_TIME_IN_SECONDS", "TRANSACTION_CHECK_TIMES"),
    *("TRANS_OFFSET", "REDIRECT", "PROPERTY_FORWARD_QUEUE_ID", "TIMER_ROLL_LABEL"),
)
CHANGING_THE_BROKER = {"INNER_NUM": 50001, "INNER_BASE": 20000}

UNIMPLEMENTED = ("PullMessage", "UpdateOffset", "GetOffset", "QueryOffset")


@case()
async def unimplemented(scene: Scene) -> None:
    for name in UNIMPLEMENTED:
        text = f"grpc: UNIMPLEMENTED Method apache.rocketmq.v2.MessagingService/{name} is unimplemented"
        ours, why = ["grpc: UNIMPLEMENTED …"], "the library's own text"
        scene.check(name, await scene.client().ask(name), [text], ours=ours, why=why)
    blank = status(40002, "The specified topic is blank")
    scene.check("SyncLiteSubscription", await scene.client().ask("SyncLiteSubscription"), blank)


@case(
    {
        **{f"route-{name}": kind(name) for name in TYPES},
        "route-plain": {},
        "route-surplus": {"read_queues": 6, "write_queues": 2},
        "route-surplus-write": {"read_queues": 1, "write_queues": 3},
        "route-read": {"perm": 4},
        "route-write": {"perm": 2},
        "route-none": {"perm": 0},
    }
)
async def routes(scene: Scene) -> None:
    client = scene.client()
    own = scene.own_address
    for name in (*TYPES, "plain", "read", "write", "none"):
        answer = await client.ask("QueryRoute", topic={"name": f"route-{name}"}, endpoints=own)
        scene.check(name, answer, OK)
    for name, count, first, surplus in (("surplus", 6, 2, "READ"), ("surplus-write", 3, 1, "WRITE")):
        answer = await client.ask("QueryRoute", topic={"name": f"route-{name}"}, endpoints=own)
        there = [surplus] * (count - first) + ["READ_WRITE"] * first
        apache, ours = (
            [*OK, *(f"message_queues[{at}].permission: {permission}" for at, permission in enumerate(each))]
            for each in (there, there[::-1])
        )
        scene.check(name, answer, apache, ours=ours, why="the queues' true ids")
    named = {"name": "route-plain", "resource_namespace": "ns"}
    answer = await client.ask("QueryRoute", topic=named, endpoints=own)
    scene.check("namespace", answer, [*OK, "message_queues[0].topic.resource_namespace: 'ns'"])
    why = "a client finds the server where it dialled it"
    where = "message_queues[0].broker.endpoints.addresses[0].{}"
    apache = [where.format("host: '127.0.0.1'"), where.format("port: <grpc>")]
    answer = await client.ask("QueryRoute", topic={"name": "route-plain"}, endpoints=ASKED_AT)
    scene.check(
        "elsewhere", answer, apache, ours=[where.format("host: '10.0.0.9'"), where.format("port: 8081")], why=why
    )
    for scheme, label in ((1, "IPv4"), (2, "IPv6"), (3, "DOMAIN_NAME")):
        answer = await client.ask("QueryRoute", topic={"name": "route-plain"}, endpoints={"scheme": scheme})
        ours = [f"message_queues[0].broker.endpoints.scheme: {label}"]
        scene.check(f"no address {label}", answer, apache, ours=ours, why=why)
    answer = await client.ask("QueryRoute", topic={"name": "route-plain"})
    scene.check("no scheme", answer, apache, ours=["status.code: …"], why=why)
    missing = await client.ask("QueryRoute", topic={"name": "route-missing"}, endpoints=ASKED_AT)
    scene.check("missing", missing, status(40402, NO_ROUTE.format("route-missing")))
    for label, (name, text) in BAD_TOPICS.items():
        answer = await client.ask("QueryRoute", topic={"name": name}, endpoints=ASKED_AT)
        scene.check(f"topic {label}", answer, status(40002, text))


@case(
    {"assigned": {"read_queues": 3, "write_queues": 3}, "assigned-write": {"perm": 2}},
    {"G-assigned-order": {"consume_message_orderly": True}},
)
async def assignments(scene: Scene) -> None:
    client = scene.client()

    async def ask(topic: str, group: str) -> Answer:
        return await client.ask(
            "QueryAssignment", topic={"name": topic}, group={"name": group}, endpoints=scene.own_address
        )

    one = ["assignments[0].message_queue.id: -1", "assignments[0].message_queue.permission: READ_WRITE"]
    scene.check("missing group", await ask("assigned", "G-nobody"), [*OK, *one])
    ordered = await ask("assigned", "G-assigned-order")
    scene.check("in order", ordered, [*OK, "assignments[2].message_queue.id: 2"])
    scene.check("not readable", await ask("assigned-write", "G-nobody"), status(40300, "no readable queue"))
    scene.check(
        "missing topic", await ask("assigned-missing", "G-nobody"), status(40402, NO_ROUTE.format("assigned-missing"))
    )
    for label, (name, text) in BAD_TOPICS.items():
        scene.check(f"topic {label}", await ask(name, "G"), status(40002, text))
    for label, (name, text) in BAD_GROUPS.items():
        scene.check(f"group {label}", await ask("assigned", name), status(40003, text))


@case({"checked": kind("NORMAL"), "checked-read": {"perm": 4}})
async def send_checks(scene: Scene) -> None:
    client = scene.client()

    async def one(
        label: str, code: int, text: str, topic: str = "checked", *, ours: object = None, why: str = "", **more: object
    ) -> None:
        answer = masked_offset(await send(client, topic, **more))
        scene.check(label, answer, status(code, text), ours=status(*ours) if ours else None, why=why)

    scene.check("1 no message", await client.ask("SendMessage"), status(40016, "no message to send"))
    for label, (name, text) in BAD_TOPICS.items():
        await one(f"2 topic {label}", 40002, text, name)
    two = [message("checked"), message("checked-read")]
    scene.check(
        "3 topics", await client.ask("SendMessage", messages=two), status(40016, "topic in message is not same")
    )
    two[1]["topic"] = {"name": "checked", "resource_namespace": "ns"}
    scene.check(
        "3 namespaces", await client.ask("SendMessage", messages=two), status(40016, "topic in message is not same")
    )
    await one("4 no body", 41302, "message body cannot be empty", body=b"")
    await one("4 long body", 41301, "message body cannot exceed the max 4194304", body=bytes(4194305))
    await one("4 longest body", 20000, "OK", body=bytes(4194304))
    await one(
        "5 properties", 43101, "too many user properties, max is 128", properties={f"p{at}": "v" for at in range(129)}
    )
    await one("5 most properties", 20000, "OK", properties={f"p{at}": "v" for at in range(128)})
    for name in RESERVED:
        await one(f"6 reserved {name}", 40007, f"property is used by system: {name}", properties={name: "v"})
    for name in OWN_TO_THE_BROKER:
        await one(f"6 free {name}", 20000, "OK", properties={name: "1"})
    for name, code in CHANGING_THE_BROKER.items():
        ours = (40007, f"property is used by system: {name}")
        await one(
            f"6 refused {name}", code, "…", properties={name: "1"}, ours=ours, why="it changes what the broker does"
        )
    text = "the key of property cannot contain control character"
    for number in (0, 1, 0x1F, 0x7F, 0x9F):
        await one(f"6 key with U+{number:04X}", 40007, text, properties={f"a{chr(number)}": "v"})
    await one(
        "6 value with control", 40007, "the value of property cannot contain control character", properties={"a": "\2"}
    )
    await one("6 empty name and value", 20000, "OK", properties={"": "", "b": ""})
    await one("6 U+00A0", 20000, "OK", properties={"a\xa0": "\xa0"})
    await one("7 blank tag", 40004, "tag cannot be the char sequence of whitespace", tag=" ")
    await one("7 tag with bar", 40004, "tag cannot contain '|'", tag="a|b")
    await one("7 tag with control", 40004, "tag cannot contain control character", tag="a\n")
    await one("7 empty tag", 20000, "OK", tag="")
    await one("8 blank key", 40005, "key cannot be the char sequence of whitespace", keys=["a", " "])
    await one("8 empty key", 20000, "OK", keys=[""])
    await one("8 key with control", 40005, "key cannot contain control character", keys=["a\1"])
    await one("8 key with blank", 20000, "OK", keys=["a b"])
    text = "the total size of user property is too large, max is 16384"
    await one("9 total", 43101, text, properties={"a": "v" * 16384})
    await one("9 total with tag and keys", 43101, text, properties={"a": "v" * 16380}, tag="t", keys=["k", "kk"])
    await one("9 most", 20000, "OK", properties={"a": "v" * 16383})
    await one("9 two bytes each", 43101, text, properties={"a": "ä" * 8192})
    for label, identity in (("empty", ""), ("blank", " ")):
        await one(f"10 {label} id", 40009, "message id cannot be empty", message_id=identity)
    late = {"orphaned_transaction_recovery_duration": {"seconds": 3601}}
    text = "the max transaction recovery time of message is too large, max is 3600"
    await one("11 recovery", 40000, text, message_type=4, **late)
    await one("11 recovery of a plain one", 20000, "OK", **late)
    text = "the max delay time of message is too large, max is 86400000"
    await one("12 delay", 40012, text, delivery_timestamp={"seconds": int(time.time()) + 86_500})
    reason = "an escaped exception there"
    ours = (40000, "…")
    await one("13 priority", 50001, "…", priority=-1, ours=ours, why=reason)
    await one("14 blank group", 40006, "message group cannot be the char sequence of whitespace", message_group=" ")
    await one("14 empty group", 20000, "OK", message_group="")
    await one("14 long group", 40006, "message group exceed the max size 64", message_group="g" * 64)
    await one("14 long group of two bytes", 40006, "message group exceed the max size 64", message_group="ä" * 32)
    await one("14 group with control", 40006, "message group cannot contain control character", message_group="a\1")
    text = "TopicMessageType validate failed, the expected type is {}, but actual type is {}"
    await one("15 missing topic", 40014, text.format("UNSPECIFIED", "NORMAL"), "checked-missing")
    await one("15 longest group", 40014, text.format("NORMAL", "FIFO"), message_group="g" * 63)
    await one("16 not writable", 40300, "no writable queue", "checked-read")
    reason = "an id becomes part of the stored properties"
    await one("id with control", 20000, "OK", message_id="ID\1", ours=(40009, "…"), why=reason)
    reason = "stored properties hold at most 32 KiB"
    await one(
        "long trace context",
        50001,
        "the message is illegal, …",
        trace_context="t" * 33_000,
        ours=(43101, "…"),
        why=reason,
    )


@case({f"typed-{name}": kind(name) for name in TYPES})
async def types_of_messages(scene: Scene) -> None:
    """Send each type of message to each type of topic."""
    client = scene.client()
    soon = {"seconds": int(time.time()) + 3600}
    sent = {
        "NORMAL": {},
        "FIFO": {"message_group": "g", "message_type": 1},
        "DELAY": {"delivery_timestamp": soon},
        "TRANSACTION": {"message_type": 4},
        "PRIORITY": {"priority": 1},
    }
    others = {
        "FIFO without group": {"message_type": 2},
        "LITE": {"message_type": 5},
        "group as property": {"properties": {"__SHARDINGKEY": "g"}},
    }
    takes = {name: (name,) for name in TYPES} | {"MIXED": tuple(sent), "UNSPECIFIED": ()}
    for topic in TYPES:
        for name, fields in sent.items():
            text = f"TopicMessageType validate failed, the expected type is {topic}, but actual type is {name}"
            wanted = OK if name in takes[topic] else status(40014, text)
            scene.check(f"{name} at {topic}", masked_offset(await send(client, f"typed-{topic}", **fields)), wanted)
    for name, fields in others.items():
        actual = "FIFO" if "properties" in fields else "NORMAL"
        text = f"TopicMessageType validate failed, the expected type is NORMAL, but actual type is {actual}"
        wanted = OK if actual == "NORMAL" else status(40014, text)
        scene.check(f"{name} at NORMAL", masked_offset(await send(client, "typed-NORMAL", **fields)), wanted)


def masked_offset(answer: Answer) -> Answer:
    """Mask the offset: half and timed messages have an offset in a queue shared by all topics."""
    for item in answer.items:
        for entry in item.entries:
            entry.offset = min(entry.offset, 0)
    return answer


@case({"told": {}}, {"G-told": {}, "G-told-order": {"consume_message_orderly": True, "retry_max_times": 3}})
async def settings(scene: Scene) -> None:
    def subscribing(
        group: str = "G-told", topic: str = "told", kind: int = 1, expression: str = "*"
    ) -> dict[str, object]:
        entry = {"topic": {"name": topic}, "expression": {"type": kind, "expression": expression}}
        return {"group": {"name": group}, "subscriptions": [entry], "receive_batch_size": 7}

    async def ask(label: str, wanted: object, *, ours: object = None, why: str = "", **fields: object) -> None:
        stream = scene.client(f"settings {label}").telemetry()
        answer = await stream.ask(settings=fields)
        scene.check(label, answer, wanted, ours=ours, why=why)
        await stream.end()

    more = {"request_timeout": {"seconds": 3}, "access_point": ASKED_AT, "user_agent": {"language": 5, "version": "1"}}
    await ask(
        "producer",
        [*OK, "settings.backoff_policy.max_attempts: 3", "settings.publishing.max_body_size: 4194304"],
        client_type=1,
        publishing={"topics": [{"name": "told"}]},
        **more,
    )
    await ask("producer of nothing", OK, client_type=1, publishing={})
    await ask("producer of a missing topic", OK, client_type=1, publishing={"topics": [{"name": "told-missing"}]})
    await ask("publishing without a type", OK, publishing={"topics": [{"name": "told"}]})
    for number, role in ((2, "push"), (3, "simple")):
        wanted = [*OK, "settings.backoff_policy.max_attempts: 17", "settings.subscription.receive_batch_size: 32"]
        await ask(f"{role} consumer", wanted, client_type=number, subscription=subscribing(), **more)
    await ask(
        "in order",
        [*OK, "settings.backoff_policy.max_attempts: 4", "settings.subscription.fifo: True"],
        client_type=2,
        subscription=subscribing("G-told-order"),
    )
    missing = ["grpc: INVALID_ARGUMENT …group not found: G-told-missing"]
    why = "consumers begin before their group is created"
    await ask("missing group", missing, ours=OK, why=why, client_type=2, subscription=subscribing("G-told-missing"))
    await ask("missing topic", OK, client_type=2, subscription=subscribing(topic="told-missing"))
    await ask("illegal subscribed topic", OK, client_type=2, subscription=subscribing(topic="a b"))
    await ask("SQL that cannot be read", OK, client_type=2, subscription=subscribing(kind=2, expression="a ="))
    failed = "grpc: INVALID_ARGUMENT process client telemetryCommand failed. "
    await ask(
        "neither", ["grpc: INVALID_ARGUMENT there is no publishing or subscription data in settings"], client_type=1
    )
    await ask(
        "illegal publishing topic",
        [failed + BAD_TOPICS["character"][1]],
        client_type=1,
        publishing={"topics": [{"name": "a b"}]},
    )
    for label, (name, text) in BAD_GROUPS.items():
        await ask(f"group {label}", [failed + text], client_type=2, subscription=subscribing(name))
    await ask(
        "SQL without text",
        [failed + "expression format is not correct"],
        client_type=2,
        subscription=subscribing(kind=2, expression=""),
    )
    await ask(
        "bars as tags",
        [failed + "expression format is not correct"],
        client_type=2,
        subscription=subscribing(expression="||"),
    )
    for number, role in ((4, "PULL_CONSUMER"), (0, "CLIENT_TYPE_UNSPECIFIED")):
        text = f"grpc: INTERNAL process client telemetryCommand failed. Client type is not consumer, type: {role}"
        await ask(f"subscription of {role}", [text], client_type=number, subscription=subscribing())
    unknown = scene.client("settings unknown language", language="xyz").telemetry()
    answer = await unknown.ask(settings={"client_type": 1, "publishing": {"topics": [{"name": "told"}]}})
    scene.check(
        "unknown language", answer, ["grpc: INTERNAL …LanguageCode.xyz"], ours=OK, why="an unknown language is OTHER"
    )
    twice = scene.client("settings twice").telemetry()
    for time_ in ("first", "second"):
        answer = await twice.ask(settings={"client_type": 3, "subscription": subscribing()})
        scene.check(f"{time_} time", answer, OK)


@case({"beating": {}}, {"G-beating": {}, "G-other": {}})
async def heartbeats(scene: Scene) -> None:
    text = "cannot find client settings for this client"
    unknown = scene.client("beats without settings")
    scene.check("producer unknown", await unknown.ask("Heartbeat", client_type=1), status(40015, text))
    answer = await unknown.ask("Heartbeat", client_type=3, group={"name": "G-beating"})
    why = "a consumer is taken from its request"
    scene.check("consumer unknown", answer, status(40015, text), ours=OK, why=why)
    client = scene.client()
    await consumer(client, "beating", "G-beating")
    for label, group in (("own", "G-beating"), ("another", "G-other")):
        scene.check(f"{label} group", await client.ask("Heartbeat", client_type=3, group={"name": group}), OK)
    for label, (name, text) in BAD_GROUPS.items():
        scene.check(
            f"group {label}", await client.ask("Heartbeat", client_type=3, group={"name": name}), status(40003, text)
        )
    producer = scene.client("beating producer")
    await producer.telemetry().ask(settings={"client_type": 1, "publishing": {"topics": [{"name": "beating"}]}})
    scene.check("producer", await producer.ask("Heartbeat", client_type=1), OK)
    xyz = scene.client("beating xyz", language="xyz")
    await (
        scene.client("beating xyz")
        .telemetry()
        .ask(settings={"client_type": 1, "publishing": {"topics": [{"name": "beating"}]}})
    )
    answer = await xyz.ask("Heartbeat", client_type=1)
    scene.check(
        "unknown language", answer, ["status.code: INTERNAL_SERVER_ERROR"], ours=OK, why="an unknown language is OTHER"
    )


@case({"receiving": {}, "receiving-write": {"perm": 2}}, {"G-receiving": {}})
async def receive_checks(scene: Scene) -> None:
    client = scene.client()
    await consumer(client, "receiving", "G-receiving")

    async def one(
        label: str,
        wanted: object,
        topic: str = "receiving",
        group: str = "G-receiving",
        *args: object,
        ours: object = None,
        why: str = "",
        **more: object,
    ) -> None:
        scene.check(label, await receive(client, topic, group, *args, **more), wanted, ours=ours, why=why)

    for label, (name, text) in BAD_TOPICS.items():
        await one(f"topic {label}", status(40002, text), name)
    for label, (name, text) in BAD_GROUPS.items():
        await one(f"group {label}", status(40003, text), group=name)
    await one(
        "short time", status(40011, "the invisibleTime is too small. min is 10000"), invisible_duration={"seconds": 9}
    )
    await one("no time", status(40011, "the invisibleTime is too small. min is 10000"), invisible_duration={})
    await one(
        "long time",
        status(40011, "the invisibleTime is too large. max is 43200000"),
        invisible_duration={"seconds": 43_201},
    )
    text = "parse the consumer's subscription failed"
    await one("blank SQL", status(50001, text), "receiving", "G-receiving", " ", 2)
    await one("no SQL", ["status.code: ILLEGAL_FILTER_EXPRESSION"], "receiving", "G-receiving", "", 2)
    await one("bars as tags", status(40010, "subString split error"), "receiving", "G-receiving", "||")
    await one("SQL that cannot be read", status(50001, text), "receiving", "G-receiving", "a =", 2)
    await one(
        "missing topic",
        ["status.code: INTERNAL_SERVER_ERROR"],
        "receiving-missing",
        ours=["status.code: TOPIC_NOT_FOUND"],
        why="an escaped null there",
    )
    await one(
        "no readable queue",
        status(40300, "no readable queue"),
        "receiving-write",
        message_queue={"topic": {"name": "receiving-write"}, "broker": {}},
    )
    text = "The deadline time remaining is not enough for polling, please check network condition"
    await one("short deadline", status(40018, text), seconds=3)
    old = scene.client(client_version=None)
    scene.check(
        "short deadline of an old client",
        await receive(old, "receiving", "G-receiving", seconds=3),
        status(40000, text),
    )
    answer = await client.ask("ReceiveMessage", None)
    scene.check(
        "no deadline, no topic", answer, [], ours=status(40002, BAD_TOPICS["none"][1]), why="no deadline is no error"
    )


@case({"acked": {}, "acked-two": {}})
async def handle_checks(scene: Scene) -> None:
    client = scene.client()
    await consumer(client, "acked", "G-acked")
    handle = f"0 {int(time.time() * 1000)} 60000 0 0 {BROKER} 0 0 0"
    old = f"0 1700000000000 10000 0 0 {BROKER} 0 0 0"
    expired = status(40013, "receipt handle is expired")
    for label, (name, text) in BAD_TOPICS.items():
        scene.check(f"ack: topic {label}", await ack(client, name, "G-acked", handle), status(40002, text))
        scene.check(f"change: topic {label}", await change(client, name, "G-acked", handle, 10), status(40002, text))
    for label, (name, text) in BAD_GROUPS.items():
        scene.check(f"ack: group {label}", await ack(client, "acked", name, handle), status(40003, text))
        scene.check(f"change: group {label}", await change(client, "acked", name, handle, 10), status(40003, text))
    answer = await ack(client, "acked", "G-acked")
    scene.check("ack: no entry", answer, status(50001, "ack message result is empty"))
    scene.check(
        "ack: expired", await ack(client, "acked", "G-acked", old), ["entries[0].status.code: INVALID_RECEIPT_HANDLE"]
    )
    scene.check("change: expired", await change(client, "acked", "G-acked", old, 10), expired)
    stranger = scene.client("without settings")
    answer = await change(stranger, "acked", "G-acked", old, 10)
    why = "an escaped null there"
    scene.check(
        "change: expired, without settings", answer, ["status.code: INTERNAL_SERVER_ERROR"], ours=expired, why=why
    )
    scene.check(
        "change: negative",
        await change(client, "acked", "G-acked", handle, -1),
        status(40011, "the invisibleTime is too small. min is 0"),
    )
    scene.check(
        "change: long",
        await change(client, "acked", "G-acked", handle, 43_201),
        status(40011, "the invisibleTime is too large. max is 43200000"),
    )
    bad = ["status.code: INVALID_RECEIPT_HANDLE"]
    for label, words in {
        "empty": "",
        "seven words": " ".join(handle.split(" ")[:7]),
        "letters": handle.replace("60000", "x"),
    }.items():
        why = "SDKs repeat an internal error for ever"
        scene.check(f"ack: {label}", await ack(client, "acked", "G-acked", words), [], ours=bad, why=why)
        scene.check(f"change: {label}", await change(client, "acked", "G-acked", words, 10), [], ours=bad, why=why)
    foreign = handle.replace(BROKER, "zzz")
    why = "Apache's local mode asks its own broker whatever the name"
    answer = await ack(client, "acked", "G-acked", foreign)
    scene.check("ack: foreign broker", answer, OK, ours=["status.code: INVALID_RECEIPT_HANDLE"], why=why)
    answer = await change(client, "acked", "G-acked", foreign, 10)
    scene.check("change: foreign broker", answer, [], ours=status(40013, "cannot find broker zzz"), why=why)
    scene.check(
        "ack: unknown topic",
        await ack(client, "acked-missing", "G-acked", handle),
        ["entries[0].status.code: INTERNAL_SERVER_ERROR"],
    )
    scene.check(
        "ack: good and expired",
        await ack(client, "acked", "G-acked", old, old),
        ["entries[1].status.code: INVALID_RECEIPT_HANDLE"],
    )


@case({"ended": kind("TRANSACTION"), "recalled-from": kind("DELAY"), "recalled-plain": kind("NORMAL")})
async def small_calls(scene: Scene) -> None:
    """Check EndTransaction, RecallMessage, NotifyClientTermination, ForwardMessageToDeadLetterQueue by their fields."""
    client = scene.client()
    end = {"message_id": "ID1", "resolution": 1}
    answer = await client.ask("EndTransaction", topic={"name": "ended"}, **end)
    scene.check("end: no id", answer, status(40008, "transaction id cannot be empty"))
    answer = await client.ask("EndTransaction", topic={"name": "a b"}, transaction_id="x", **end)
    scene.check("end: illegal topic", answer, status(40002, BAD_TOPICS["character"][1]))
    answer = await client.ask("EndTransaction", topic={"name": "ended"}, transaction_id="x", **end)
    why = "unknown is no error of the server"
    scene.check(
        "end: unknown",
        answer,
        ["status.code: INTERNAL_SERVER_ERROR", "status.message: 'cannot found transaction data'"],
        ours=["status.code: INVALID_TRANSACTION_ID"],
        why=why,
    )
    text = "TopicMessageType validate failed, the expected type is {}, but actual type is DELAY"
    for name, expected in (("recalled-plain", "NORMAL"), ("recalled-missing", "UNSPECIFIED")):
        answer = await client.ask("RecallMessage", topic={"name": name}, recall_handle="x")
        scene.check(f"recall: {name}", answer, status(40014, text.format(expected)))
    answer = await client.ask("RecallMessage", topic={"name": "a b"}, recall_handle="x")
    scene.check("recall: illegal topic", answer, status(40002, BAD_TOPICS["character"][1]))
    for label, handle in {"empty": "", "not base64": "?", "other": "YWJj"}.items():
        answer = await client.ask("RecallMessage", topic={"name": "recalled-from"}, recall_handle=handle)
        scene.check(
            f"recall: {label}",
            answer,
            ["status.code: INTERNAL_SERVER_ERROR"],
            ours=["status.code: BAD_REQUEST"],
            why="a bad handle is no error of the server",
        )
    unknown = status(40015, "cannot find client settings for this client")
    scene.check("termination: unknown", await client.ask("NotifyClientTermination"), unknown)
    answer = await client.ask("NotifyClientTermination", group={"name": "G-unknown"})
    scene.check("termination: unknown with group", answer, unknown)
    await consumer(client, "ended", "G-small")
    handle = f"0 {int(time.time() * 1000)} 60000 0 0 {BROKER} 0 0"
    answer = await client.ask(
        "ForwardMessageToDeadLetterQueue",
        group={"name": "G"},
        topic={"name": "ended"},
        receipt_handle=handle,
        message_id="ID1",
    )
    scene.check("forward: no offset", answer, status(40013, "commit log offset is empty"))
    for label, (name, text) in BAD_GROUPS.items():
        answer = await client.ask(
            "ForwardMessageToDeadLetterQueue", group={"name": name}, topic={"name": "ended"}, receipt_handle=handle
        )
        scene.check(f"forward: group {label}", answer, status(40003, text))

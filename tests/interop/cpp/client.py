"""Scenarios of Apache's C++ client with one name server, with the results as JSON:

    python client.py NAME_SERVER BROKER PREFIX SCENARIO...

It uses the package `rocketmq`, which contains the client's library, without transactions and SQL. Topics and groups are
called PREFIX-SCENARIO; topics exist before (all but `created`), and so do the groups' topics for retries: a consumer
without a retry topic waits 30 s. Scenarios run one after the other, because the client's threads disturb each other. A
failed scenario reports its error.
"""

import contextlib
import ctypes
import json
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rocketmq.client import Message, MessageModel, Producer, PullConsumer, PushConsumer, RecvMessage
from rocketmq.exceptions import ProducerException, ffi_check
from rocketmq.ffi import _CMessageQueue, _CPullStatus, dll

NAME_SERVER, _, PREFIX = sys.argv[1:4]
PATIENT_SECONDS = 100.0
SUCCESS, LATER = 0, 1
PROPERTIES = """CLUSTER DELAY KEYS MSG_REGION ORIGIN_MESSAGE_ID REAL_QID REAL_TOPIC
RETRY_TOPIC TAGS TRACE_ON UNIQ_KEY WAIT city""".split()
LARGE = "large " + "0123456789" * 2000

Facts = dict[str, Any]
Listener = Callable[[Facts], int]
_running: list[Any] = []  # keep them until the end: shutting a client down also stops another client's pulls


def wait_for(what: str, condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + PATIENT_SECONDS
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"no {what} within {PATIENT_SECONDS:g} s")
        time.sleep(0.02)
    return found


def producer(group: str, **settings: int) -> Producer:
    """Return a connected producer: while its first heartbeat connects, the client drops other requests to that
    broker.
    """
    made = Producer(group, timeout=int(PATIENT_SECONDS * 1000), **settings)
    made.set_namesrv_addr(NAME_SERVER)
    ffi_check(dll.SetProducerInstanceName(made._handle, group.encode()))
    made.start()
    _running.append(made)
    ready = message(f"{PREFIX}-ready", "ready")

    def is_connected() -> bool:
        with contextlib.suppress(ProducerException):
            made.send_sync(ready)
            return True
        return False

    wait_for("connection", is_connected)
    return made


def message(topic: str, body: str, tags: str = "") -> Message:
    made = Message(topic)
    made.set_body(body)
    if tags:
        made.set_tags(tags)
    return made


def told_of(got: RecvMessage) -> Facts:
    """Return the content of a received message: a copy, because the client frees the message after the listener."""
    named = {name: (got[name] or b"").decode() for name in PROPERTIES}
    return {
        "body": got.body.decode(), "id": got.id, "topic": got.topic, "queue": got.queue_id, "offset": got.queue_offset,
        "retries": got.reconsume_times, "tags": (got.tags or b"").decode(), "keys": (got.keys or b"").decode(),
        "city": named["city"], "delay": got.delay_time_level, "properties": " ".join(n for n in PROPERTIES if named[n]),
        "unique key": named["UNIQ_KEY"], "waited": got.store_timestamp - got.born_timestamp, "stored": got.store_size,
    }  # fmt: skip


def consume(
    topic: str,
    group: str,
    *,
    tags: str = "*",
    orderly: bool = False,
    model: MessageModel = MessageModel.CLUSTERING,
    instance: str = "",
    listen: Listener = lambda _: SUCCESS,
) -> list[Facts]:
    """Start a push consumer. Return the list of received messages, in the order of arrival."""
    seen: list[Facts] = []

    def on_message(_: int, handle: int) -> int:
        seen.append(told_of(RecvMessage(handle)))
        return listen(seen[-1])

    made = PushConsumer(group, orderly, model)
    made.set_namesrv_addr(NAME_SERVER)
    made.set_instance_name(instance or group)
    ffi_check(dll.Subscribe(made._handle, topic.encode(), tags.encode()))
    made._register_callback(on_message)  # the package's own callback returns success if a listener raises
    made.start()
    _running.append(made)
    return seen


def bodies(seen: list[Facts]) -> str:
    return " ".join(sorted(one["body"] for one in seen))


def shape(text: str) -> str:
    return f"{len(text)} hex" if re.fullmatch("[0-9A-F]+", text) else text


def described(answer: Any) -> str:
    return f"status {answer.status.name}, offset {answer.offset}, id {shape(answer.msg_id)}"


def sends(topic: str) -> Facts:
    """Send in every way: a plain message, with all fields, compressed, with a callback, one-way, in a batch."""
    sender = producer(topic)
    rich = message(topic, "rich", "TagA")
    rich.set_keys("k1 k2")
    rich.set_property("city", "東京")
    answers = [sender.send_sync(sent) for sent in (message(topic, "plain"), rich, message(topic, LARGE))]
    problems: list[str] = []
    sender.send_async(message(topic, "async"), answers.append, lambda error: problems.append(str(error)))
    wait_for("answer", lambda: problems or len(answers) == 4)
    sender.send_oneway(message(topic, "one-way"))
    seen = consume(topic, topic)
    wait_for("five messages", lambda: len(seen) >= 5)
    # The client sends 1 for true, which the broker reads as false: it stores one message, whose body begins with a
    # zero.
    batched = sender.send_batch([message(topic, f"batch-{number}", "TagB") for number in range(3)])
    wait_for("six messages", lambda: len(seen) >= 6)
    known = {one["id"] for one in seen}
    names = ["offset", "retries", "tags", "keys", "city", "properties"]
    received = {
        one["body"].split(" ")[0] or "batch": {
            **{name: one[name] for name in names},
            "characters": len(one["body"]),
            "is small": one["stored"] < 1000,
            "has its id": one["id"] == one["unique key"],
        }
        for one in seen
    }
    return {
        "answers": [described(answer) for answer in answers],
        "problems": problems,
        "batch": described(batched),
        "ids agree": [answer.msg_id in known for answer in answers],
        "received": received,
    }


def created(topic: str) -> Facts:
    """Let the first send create a topic."""
    answer = producer(topic).send_sync(message(topic, "first", "TagA"))
    reader = puller(f"{topic}-reader")
    wait_for("pull", lambda: pull_queue(reader, topic, "*", 0)["found"])
    seen = consume(topic, topic)
    wait_for("the first message", lambda: seen)
    return {"answer": described(answer), "seen": bodies(seen)}


def delayed(topic: str) -> Facts:
    late = message(topic, "late")
    late.set_delay_time_level(1)
    answer = producer(topic).send_sync(late)
    seen = consume(topic, topic)
    (got,) = wait_for("late message", lambda: seen)
    return {"status": answer.status.name, "waited long enough": got["waited"] >= 950, "delay": got["delay"],
            "properties": got["properties"], "retries": got["retries"]}  # fmt: skip


def filters(topic: str) -> Facts:
    sender = producer(topic)
    for number, tag in enumerate(["TagA", "TagB", "TagC", "TagA", ""]):
        sender.send_sync(message(topic, f"{number}{tag}", tag))
    everything = consume(topic, topic)
    some = consume(topic, f"{topic}-tags", tags="TagA || TagC")
    wait_for("eight messages", lambda: len(everything) >= 5 and len(some) >= 3)
    return {"all": bodies(everything), "tags": bodies(some)}


def orderly(topic: str) -> Facts:
    """Check that the order of each key holds, although one message makes its queue wait once."""
    sender = producer(topic)
    keys = ["apples", "pears", "plums"]
    answers = []
    for number in range(6):
        for place, key in enumerate(keys):
            sent = message(topic, f"{key}{number}", key)
            if number < 5:
                answers.append(described(sender.send_orderly(sent, place)))
            else:
                sender.send_oneway_orderly(sent, place)
    tries: list[str] = []

    def hesitate(got: Facts) -> int:
        tries.append(got["body"])
        return LATER if got["body"] == "pears2" and tries.count("pears2") == 1 else SUCCESS

    seen = consume(topic, topic, orderly=True, listen=hesitate)
    wait_for("nineteen messages", lambda: len(seen) >= 19)
    told = {key: " ".join(one["body"][-1] for one in seen if one["tags"] == key) for key in keys}
    return {"answers": answers, "received": told, "queues": {one["tags"]: one["queue"] for one in seen},
            "retries of a message": [one["retries"] for one in seen if one["body"] == "pears2"]}  # fmt: skip


def retried(topic: str) -> list[Any]:
    """Check that a message is redelivered after its listener failed."""
    sent = message(topic, "again", "TagA")
    sent.set_keys("k7")
    producer(topic).send_sync(sent)
    seen = consume(topic, topic, listen=lambda got: SUCCESS if got["retries"] else LATER)
    wait_for("two tries", lambda: len(seen) >= 2)
    return [[one["retries"], one["topic"] == topic, one["tags"], one["keys"], one["properties"]] for one in seen]


def dead(topic: str) -> list[str]:
    """Check that a message is in the dead letters after the group's one retry."""
    producer(topic).send_sync(message(topic, "poison", "TagA"))
    consume(topic, topic, listen=lambda _: LATER)
    reader = puller(f"{topic}-reader")
    return wait_for("dead letter", lambda: pull_queue(reader, f"%DLQ%{topic}", "*", 0)["found"])


def broadcast(topic: str) -> Facts:
    """Check that both members get every message. They start at a queue's end, so a message is needed to see that they
    run.
    """
    members = [
        consume(topic, topic, model=MessageModel.BROADCASTING, instance=topic + name) for name in ("one", "other")
    ]
    sender = producer(topic)

    def began() -> bool:
        sender.send_sync(message(topic, "began", "TagB"))
        return all(members)

    wait_for("beginning", began)
    for number in range(6):
        sender.send_sync(message(topic, f"m{number}", "TagA"))
    told = lambda: [bodies([one for one in seen if one["tags"] == "TagA"]) for seen in members]  # noqa: E731
    wait_for("six messages each", lambda: all(text.count("m") >= 6 for text in told()))
    return {"members": told()}


def puller(group: str) -> PullConsumer:
    made = PullConsumer(group)
    made.set_namesrv_addr(NAME_SERVER)
    made.start()
    _running.append(made)
    return made


def pull_queue(consumer: PullConsumer, topic: str, tags: str, offset: int, count: int = 32) -> Facts:
    """Return the result of a pull from the topic's first queue, as soon as the topic exists and the client is
    connected.
    """
    queues, size = ctypes.POINTER(_CMessageQueue)(), ctypes.c_int()
    named = consumer._handle, topic.encode(), ctypes.pointer(queues), size
    wait_for(f"route of {topic}", lambda: dll.FetchSubscriptionMessageQueues(*named) == 0 and size.value)

    def pull() -> Facts | None:
        result = dll.Pull(consumer._handle, ctypes.pointer(queues[0]), tags.encode(), offset, count)
        found = [told_of(RecvMessage(result.msgFoundList[place])) for place in range(result.size)]
        dll.ReleasePullResult(result)
        return (
            None
            if result.pullStatus == _CPullStatus.BROKER_TIMEOUT
            else {
                "status": _CPullStatus(result.pullStatus).name,
                "next, min, max": [result.nextBeginOffset, result.minOffset, result.maxOffset],
                "found": [
                    f"{one['body']} at {one['offset']}, retries {one['retries']}, {one['properties']}" for one in found
                ],
            }
        )

    told = wait_for(f"answer to a pull from {topic}", pull)
    ffi_check(dll.ReleaseSubscriptionMessageQueue(queues))
    return told


def pulled(topic: str) -> Facts:
    sender = producer(topic)
    for number in range(5):
        sender.send_sync(message(topic, f"m{number}", f"Tag{number % 2}"))
    consumer = puller(topic)
    wait_for("five messages", lambda: pull_queue(consumer, topic, "*", 0)["next, min, max"][2] == 5)
    asked = {"all": ("*", 0, 32), "two": ("*", 1, 2), "tags": ("Tag1", 0, 32), "no tag": ("TagZ", 0, 32),
             "end": ("*", 5, 32), "beyond": ("*", 50, 32)}  # fmt: skip
    told = {name: pull_queue(consumer, topic, *place) for name, place in asked.items()}
    told["package"] = {"all": [got.body.decode() for got in consumer.pull(topic)]}
    return told


def archived(topic: str) -> list[str]:
    """Return the messages of a queue from its first one on."""
    consumer, offset, found = puller(topic), 0, []
    while True:
        told = pull_queue(consumer, topic, "*", offset)
        offset, low, high = told["next, min, max"]
        found += told["found"]
        if offset >= high:
            return [f"first {low}", *(one.split(" ")[0] for one in found)]


def refused(topic: str) -> Facts:
    """Return the broker's reasons for refusals, which the client only logs."""
    sender = producer(topic, max_message_size=64 << 20)
    ffi_check(dll.SetProducerCompressMsgBodyOverHowmuch(ctypes.c_void_p(sender._handle), 64 << 20))
    far = message(topic, "far")
    far.set_delay_time_level(99)
    told: Facts = {"delay level": sender.send_sync(far).status.name}
    for name, sent in {
        "too large": message(topic, "x" * (5 << 20)),
        "illegal name": message("not a topic!", "x"),
        "system topic": message("RMQ_SYS_TRANS_HALF_TOPIC", "x"),
    }.items():
        sender.send_async(sent, None, lambda _: None)
        wait_for(f"reason for {name}", lambda: len(reasons()) >= len(told))
        told[name] = reasons()[-1]
    return told


def reasons() -> list[str]:
    (log,) = Path.home().glob(f"logs/rocketmq-cpp/{os.getpid()}_*.log.0")
    return re.findall(r"processSendResponse error remark:(.*, error code:\d+)\[", log.read_text())


def again(_: str) -> Facts:
    """Run again: groups continue at their offsets."""
    told: Facts = {}
    for name in ("filters", "orderly"):
        topic = f"{PREFIX}-{name}"
        sender = producer(f"{topic}-again")
        for number in range(2):
            sender.send_sync(message(topic, f"again{number}"))
        seen = consume(topic, topic, orderly=name == "orderly")
        fresh = lambda seen=seen: bodies([one for one in seen if one["body"].startswith("again")])  # noqa: E731
        wait_for("two new messages", lambda fresh=fresh: fresh().count("again") >= 2)
        # The last message of each queue may be delivered twice: at least once.
        told[name] = {"fresh": fresh(), "goes on": len(seen) <= 2 + 4}
    return told


def scenario(name: str) -> Any:
    try:
        return globals()[name](f"{PREFIX}-{name}")
    except Exception as error:  # noqa: BLE001 - reported next to the other results
        return {"error": f"{type(error).__name__}: {error}"}


def main() -> None:
    names = sys.argv[4:]
    told = {name: scenario(name) for name in names}
    for client in _running:
        client.shutdown()
        client._handle = None
    print(json.dumps(told))


if __name__ == "__main__":
    main()

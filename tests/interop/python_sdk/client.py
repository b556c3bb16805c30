"""Apache's Python SDK for gRPC, unmodified: sends and consumes in every way that it has, and tells as JSON what came.

    python client.py HOST:PORT

It runs in an environment of its own: the SDK registers its messages in protobuf's default pool.
"""

import json
import sys
import threading
import time

from rocketmq import (
    ClientConfiguration,
    ConsumeResult,
    Credentials,
    FilterExpression,
    Message,
    MessageListener,
    Producer,
    PushConsumer,
    SimpleConsumer,
    TransactionChecker,
    TransactionResolution,
)

SECONDS_MAX = 100.0
FAILS_ONCE, FAILS = b"fails once", b"fails"


class Checker(TransactionChecker):
    def __init__(self):
        self.asked = []

    def check(self, message):
        self.asked.append(message.body.decode())
        return TransactionResolution.COMMIT


class Listener(MessageListener):
    """Notes what comes; ``until`` waits until a number of it is there, ``until_all`` for bodies."""

    def __init__(self):
        self.came = []
        self._changed = threading.Condition()

    def consume(self, message):
        with self._changed:
            self.came.append([message.body.decode(), message.delivery_attempt, message.message_group or ""])
            self._changed.notify_all()
        is_first = message.delivery_attempt == 1
        failed = message.body == FAILS or (message.body == FAILS_ONCE and is_first)
        return ConsumeResult.FAILURE if failed else ConsumeResult.SUCCESS

    def until(self, count):
        with self._changed:
            self._changed.wait_for(lambda: len(self.came) >= count, SECONDS_MAX)
        return sorted(self.came)

    def until_all(self, bodies):
        """What came, without what came twice: a broker may ask again before it has noted the answer."""
        with self._changed:
            self._changed.wait_for(lambda: bodies <= {body for body, _, _ in self.came}, SECONDS_MAX)
        return sorted({body for body, _, _ in self.came})


def made(topic, body, **attributes):
    message = Message()
    message.topic, message.body = topic, body
    for name, value in attributes.items():
        setattr(message, name, value)
    return message


def received(consumer, count):
    """Messages of a simple consumer, acknowledged."""
    found, end = [], time.monotonic() + SECONDS_MAX
    while len(found) < count and time.monotonic() < end:
        try:
            messages = consumer.receive(32, 15) or []
        except Exception as error:
            if "route" not in str(error):
                raise
            time.sleep(0.1)
            continue
        for message in messages:
            consumer.ack(message)
            found.append(message)
    return found


def main():
    configuration = ClientConfiguration(sys.argv[1], Credentials())
    checker, told = Checker(), {}
    producer = Producer(configuration, ("normal", "fifo", "delay", "transaction", "failing", "large"), checker=checker)
    producer.startup()
    everything, in_order, failing = Listener(), Listener(), Listener()
    pushes = [
        PushConsumer(configuration, group, listener, {topic: FilterExpression() for topic in topics})
        for group, listener, topics in (
            ("G-push", everything, ("delay", "transaction")),
            ("G-fifo", in_order, ("fifo",)),
            ("G-failing", failing, ("failing",)),
        )
    ]
    for push in pushes:
        push.startup()
    checked = producer.begin_transaction()
    producer.send(made("transaction", b"checked"), checked)

    plain = made("normal", b"hello", tag="a", keys="k1")
    plain.add_property("x", "y")
    receipt = producer.send(plain)
    producer.send(made("normal", b"other", tag="b"))
    simple = SimpleConsumer(configuration, "G-simple", {"normal": FilterExpression("a")}, 5)
    simple.startup()
    (found,) = received(simple, 1)
    told["normal"] = [
        *(found.body.decode(), found.tag, sorted(found.keys), dict(found.properties), found.delivery_attempt),
        found.message_id == receipt.message_id,
    ]
    again = made("normal", b"changed", tag="a")
    producer.send(again)
    first = []
    while not first:  # acknowledged only when it comes again
        first = simple.receive(32, 15) or []
    simple.change_invisible_duration(first[0], 10)
    (second,) = received(simple, 1)
    told["changed"] = [second.body.decode(), first[0].delivery_attempt, second.delivery_attempt]
    simple.shutdown()

    for number in range(5):
        producer.send(made("fifo", f"f{number}".encode(), message_group="g"))
    producer.send(made("failing", FAILS_ONCE))
    producer.send(made("failing", FAILS))
    producer.send(made("delay", b"past", delivery_timestamp=1))
    producer.send(made("delay", b"due", delivery_timestamp=int(time.time()) + 3))
    recalled = producer.send(made("delay", b"recalled", delivery_timestamp=int(time.time()) + 4))
    answer = producer.recall_message("delay", recalled.recall_handle)
    told["recalled"] = str(answer) == recalled.message_id
    for end in ("commit", "rollback"):
        transaction = producer.begin_transaction()
        producer.send(made("transaction", end.encode()), transaction)
        getattr(transaction, end)()

    told["fifo"] = in_order.until(5)
    told["order"] = [body for body, _, _ in in_order.came] == ["f0", "f1", "f2", "f3", "f4"]
    told["pushed"] = everything.until_all({"past", "due", "commit", "checked"})
    told["asked"] = sorted(set(checker.asked))
    told["failing"] = failing.until(4)
    dead = SimpleConsumer(configuration, "G-dead", {"%DLQ%G-failing": FilterExpression()}, 5)
    dead.startup()
    told["dead"] = [message.body.decode() for message in received(dead, 1)]
    dead.shutdown()
    try:
        producer.send(made("normal", b"x", message_group="g"))
    except Exception as error:  # noqa: BLE001 - the SDK raises what it finds
        told["refused"] = str(error)
    for client in (*pushes, producer):
        client.shutdown()
    print(json.dumps(told))


main()

"""Apache's Python SDK for gRPC, unmodified: the scenarios of `tests/interop/sdks`, with the results as JSON.

    python client.py HOST:PORT PREFIX SCENARIO...

It runs in an environment of its own: the SDK registers its messages in protobuf's default pool.
"""

import json
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from rocketmq import (
    ClientConfiguration,
    ConsumeResult,
    Credentials,
    FilterExpression,
    LitePushConsumer,
    LiteSimpleConsumer,
    Message,
    MessageListener,
    Producer,
    PushConsumer,
    SimpleConsumer,
    TransactionChecker,
    TransactionResolution,
)
from rocketmq.grpc_protocol import FilterType
from rocketmq.v5.exception import LiteSubscriptionQuotaExceededException

ENDPOINT, PREFIX, *SCENARIOS = sys.argv[1:]
SECONDS_MAX = 100.0
REQUEST_SECONDS = 10
ARCHIVED = 60
INVISIBLE_SECONDS, LOAD_INVISIBLE_SECONDS = 60, 15
CONFIGURATION = ClientConfiguration(ENDPOINT, Credentials(), request_timeout=REQUEST_SECONDS)
EVERYTHING = FilterExpression()


def named(name):
    return f"{PREFIX}-{name}"


class Checker(TransactionChecker):
    """A checker that decides by the body, and records the checked messages."""

    def __init__(self):
        self.asked = set()

    def check(self, message):
        body = message.body.decode()
        self.asked.add(body)
        is_good = body in ("checked", "commit")  # a slow client may be asked before it commits
        return TransactionResolution.COMMIT if is_good else TransactionResolution.ROLLBACK


class Listener(MessageListener):
    """A listener that records messages. It always fails for ``fails``, and at the first attempt for ``fails once``."""

    def __init__(self):
        self.came = []
        self._failed = False
        self._lock = threading.Lock()

    def consume(self, message):
        body = message.body.decode()
        with self._lock:
            self.came.append([body, message.delivery_attempt])
            is_failure = body == "fails" or (body == "fails once" and not self._failed)
            self._failed |= body == "fails once"
        return ConsumeResult.FAILURE if is_failure else ConsumeResult.SUCCESS

    def until(self, condition):
        """Return the received messages, as soon as the condition holds for them or the time is over."""
        wait_for(lambda: condition(list(self.came)))
        return list(self.came)

    def until_bodies(self, *bodies):
        """Return the received bodies: a broker may redeliver a message before it has stored the answer."""
        return sorted({body for body, _ in self.until(lambda came: set(bodies) <= {body for body, _ in came})})


def wait_for(condition):
    end = time.monotonic() + SECONDS_MAX
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)


def made(topic, body, keys=(), properties=(), **attributes):
    message = Message()
    message.topic, message.body = named(topic), body.encode()
    if keys:
        Message.keys.fset(message, *keys)
    for name, value in properties:
        message.add_property(name, value)
    for name, value in attributes.items():
        setattr(message, name, value)
    return message


def producer(topic, checker=None):
    started = Producer(CONFIGURATION, (named(topic),), checker=checker)
    started.startup()
    return started


def simple(group, topic, filter_=EVERYTHING):
    started = SimpleConsumer(CONFIGURATION, named(group), {topic: filter_}, 5)
    started.startup()
    return started


def push(group, topic, listener):
    started = PushConsumer(CONFIGURATION, named(group), listener, {named(topic): EVERYTHING})
    started.startup()
    return started


def received(consumer, count, acknowledge=True):
    """Return ``count`` messages, acknowledged by default. A dead-letter topic exists only after its first message.
    Apache's proxy fails receives before it has the settings, for which this SDK does not wait."""
    found, end = [], time.monotonic() + SECONDS_MAX
    while len(found) < count and time.monotonic() < end:
        try:
            messages = consumer.receive(32, INVISIBLE_SECONDS) or []
        except Exception as error:
            if "route" not in str(error) and "settings" not in str(error):
                raise
            time.sleep(0.1)
            continue
        for message in messages:
            if acknowledge:
                consumer.ack(message)
            found.append(message)
    return found


def subscribed(consumer, name):
    """Subscribe to a lite topic. This SDK does not wait for its settings: before them, its quota is 0."""
    try:
        consumer.subscribe_lite(name)
    except LiteSubscriptionQuotaExceededException:
        return False
    return True


def bodies(messages):
    return sorted(message.body.decode() for message in messages)


def dead_letters(group, count):
    consumer = simple(f"dead-{group}", f"%DLQ%{named(group)}")
    found = bodies(received(consumer, count))
    consumer.shutdown()
    return found


# -- scenarios


def plain():
    consumer, sender = simple("plain", named("plain")), producer("plain")
    receipt = sender.send(made("plain", "hello", keys=("k1", "k2"), properties=[("x", "y")], tag="a"))
    (found,) = received(consumer, 1)
    told = [found.body.decode(), found.tag, sorted(found.keys), dict(found.properties), found.delivery_attempt]
    consumer.shutdown()
    sender.shutdown()
    return {"message": told, "same id": found.message_id == receipt.message_id}


def invisible():
    sender, consumer = producer("invisible"), simple("invisible", named("invisible"))
    sender.send(made("invisible", "changed"))
    (first,) = received(consumer, 1, acknowledge=False)
    consumer.change_invisible_duration(first, 1)
    (second,) = received(consumer, 1)
    return {"attempts": [first.delivery_attempt, second.delivery_attempt], "body": second.body.decode()}


def filters():
    sender = producer("filters")
    for body, tag, size in (("one", "red", "1"), ("two", "green", "7"), ("three", "blue", "9")):
        sender.send(made("filters", body, tag=tag, properties=[("size", size)]))
    by_tag = simple("tags", named("filters"), FilterExpression("red || blue"))
    by_sql = simple("sql", named("filters"), FilterExpression("size > 5 AND TAGS <> 'blue'", FilterType.SQL))
    return {"tags": bodies(received(by_tag, 2)), "sql": bodies(received(by_sql, 1))}


def fifo():
    listener, sender = Listener(), producer("fifo")
    push("fifo", "fifo", listener)
    for body in ("f0", "f1", "fails once", "f3", "f4", "fails", "f6"):
        sender.send(made("fifo", body, message_group="g"))
    return {"came": listener.until(lambda came: len(came) >= 9), "dead": dead_letters("fifo", 1)}


def delay():
    listener, sender = Listener(), producer("delay")
    push("delay", "delay", listener)
    now = int(time.time())
    sender.send(made("delay", "past", delivery_timestamp=1))
    recalled = sender.send(made("delay", "recalled", delivery_timestamp=now + 8))
    answer = sender.recall_message(named("delay"), recalled.recall_handle)
    sender.send(made("delay", "due", delivery_timestamp=now + 9))
    came = listener.until_bodies("past", "due")
    return {"came": came, "early": time.time() < now + 9, "recalled": str(answer) == recalled.message_id}


def transaction():
    listener, checker = Listener(), Checker()
    sender = producer("transaction", checker)
    push("transaction", "transaction", listener)
    for end in ("checked", "dropped"):
        sender.send(made("transaction", end), sender.begin_transaction())
    for end in ("commit", "rollback"):
        begun = sender.begin_transaction()
        sender.send(made("transaction", end), begun)
        getattr(begun, end)()
    came = listener.until_bodies("checked", "commit")
    wait_for(lambda: checker.asked >= {"checked", "dropped"})
    return {"came": came, "asked": sorted(checker.asked)}


def retries():
    listener, sender = Listener(), producer("retries")
    push("retries", "retries", listener)
    for body in ("fails once", "fails"):
        sender.send(made("retries", body))
    dead = dead_letters("retries", 1)
    return {"came": sorted(listener.until(lambda came: len(came) >= 4)), "dead": dead}


def refused():
    sender, told = producer("plain"), {}
    attempts = {"type": made("plain", "x", message_group="g"), "topic": made("nowhere", "x")}
    for name, message in attempts.items():
        try:
            sender.send(message)
        except Exception as error:  # noqa: BLE001 - the SDK raises what it finds
            told[name] = str(error)
    return told


def crossed():
    """Return bodies that clients of the other protocol compressed, and a long body of ours."""
    consumer, sender = simple("crossed", named("crossed")), producer("long")
    sender.send(made("long", f"{PREFIX} " * 4000))
    found = received(consumer, 3)
    return {"came": sorted([message.body.decode()[:4], len(message.body)] for message in found)}


def archived():
    """Return the messages of the archive and the log in their order of arrival, and a message sent afterwards."""
    consumer, sender, listener = simple("archived", named("archived")), producer("archived"), Listener()
    found = received(consumer, ARCHIVED)
    sender.send(made("archived", "after"))
    found += received(consumer, 1)
    push("archived-fifo", "archived-fifo", listener)
    came = listener.until(lambda came: len(came) >= ARCHIVED)
    return {"simple": [message.body.decode() for message in found], "push": [body for body, _ in came]}


def lite():
    """Consume lite topics. Their names have one letter, because this SDK subscribes to each letter of a name."""
    listener, topic = Listener(), named("lite")
    pushed = LitePushConsumer(CONFIGURATION, named("lite-push"), topic, listener)
    polled = LiteSimpleConsumer(topic, CONFIGURATION, named("lite-simple"), 5)
    for consumer in (pushed, polled):
        consumer.startup()
        wait_for(lambda consumer=consumer: subscribed(consumer, "p"))
        consumer.subscribe_lite("q")
    sender = producer("lite")
    for body in ("p0", "fails once", "p2", "q0"):
        sender.send(made("lite", body, lite_topic="q" if body == "q0" else "p"))
    found = received(polled, 4)
    came = listener.until(lambda came: ["fails once", 2] in came and {"p2", "q0"} <= {body for body, _ in came})
    for consumer in (pushed, polled):
        consumer.shutdown()
    return {
        "push": sorted({body for body, _ in came}),
        "redelivered": ["fails once", 2] in came,
        "simple": sorted([message.lite_topic, message.body.decode()] for message in found),
    }


def load():
    """Send and consume during a restart. Every body is its send time in ms."""
    came, answered, ended = {"push": set(), "simple": set()}, set(), threading.Event()

    def note(how, body):
        came[how].add(body)
        tell(how, body)

    class Noting(MessageListener):
        def consume(self, message):
            note("push", message.body.decode())
            return ConsumeResult.SUCCESS

    def take():
        while not ended.is_set():
            try:
                for message in consumer.receive(32, LOAD_INVISIBLE_SECONDS) or []:
                    note("simple", message.body.decode())
                    consumer.ack(message)
            except Exception:  # noqa: BLE001 - the endpoint is away
                time.sleep(0.1)

    sender, consumer = producer("load"), simple("load-simple", named("load"))
    push("load-push", "load", Noting())
    threading.Thread(target=take, daemon=True).start()
    stopped = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), stopped.set()), daemon=True).start()
    while not stopped.is_set():
        body = str(int(time.time() * 1000))
        try:
            sender.send(made("load", body))
            answered.add(body)
        except Exception:  # noqa: BLE001 - the endpoint is away
            pass
        time.sleep(0.1)
    wait_for(lambda: not any(answered - bodies for bodies in came.values()))
    ended.set()
    return {how: len(answered - bodies) for how, bodies in came.items()}


def tell(name, facts):
    sys.stdout.write(f"{json.dumps([name, facts])}\n")
    sys.stdout.flush()


def run(name):
    try:
        tell(name, globals()[name]())
    except Exception as error:  # noqa: BLE001 - the others go on
        tell(name, {"error": f"{type(error).__name__}: {error}"})


with ThreadPoolExecutor(len(SCENARIOS)) as pool:
    list(pool.map(run, SCENARIOS))
os._exit(0)  # do not wait for long polls that still run

"""Find, follow, read back and forget the entries of a ledger, over a topic in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from rmqkit.errors import ClientError, NoRoute
from rmqkit.protocol.message import Message
from rmqkit.protocol.properties import encode_properties
from rmqkit.protocol.schemas.clients import MessageQueue
from rmqkit.spark.broker_pool import Bounds, Range
from rmqkit.spark.options import SinkOptions
from rmqkit.spark.sink import ledger_topic as module
from rmqkit.spark.sink.ledger import Batch, Entry, Half, Kind, pack_halves
from rmqkit.spark.sink.ledger_topic import LedgerTopic, ledger_topic
from tests.spark.messages import record_at

OPTIONS = SinkOptions(group="g", settle_ms=100, patience_ms=1000)
HOME = MessageQueue(ledger_topic("g"), "broker-a", 0)
OTHER = MessageQueue(HOME.topic, "broker-b", 0)


class Topic:
    """The ledger's topic and a producer in one: time goes on by pauses, which messages need to be dispatched.

    Attributes:
        notes: the first queue of broker-b: what was sent to it.
        away: brokers without a route.
        has_expired: whether the notes are deleted.
    """

    def __init__(self, *, exists: bool = True) -> None:
        self.pool = self
        self.exists = exists
        self.notes: list[Entry] = []
        self.away: set[str] = set()
        self.has_expired = False
        self.records: list[bytes] = []
        self.low = self.dispatched = 0
        self.now_ms = 0.0
        self.reads: list[tuple[int, int]] = []

    def pause(self, pause_ms: float) -> None:
        self.now_ms += pause_ms
        self.dispatched = len(self.records)

    def queues(self, topics: Any) -> list[MessageQueue]:
        found = [HOME] if self.exists or isinstance(topics, str) else []
        found += [OTHER] if self.notes or isinstance(topics, str) else []
        found = [queue for queue in found if queue.broker_name not in self.away]
        if not found:
            raise NoRoute("none")
        return [queue for one in reversed(found) for queue in (replace(one, queue_id=1), one)]

    def bounds(self, queues: Iterable[MessageQueue]) -> dict[MessageQueue, Bounds]:
        noted = Bounds(len(self.notes) if self.has_expired else 0, len(self.notes))
        return {queue: noted if queue == OTHER else Bounds(self.low, self.dispatched) for queue in queues}

    def bodies(self, part: Range) -> Iterator[bytes]:
        if part.queue == OTHER:
            yield record_at(0, topic=HOME.topic.encode(), body=self.notes[0].encode(), properties=b"")
            return
        assert self.low <= part.low < part.high <= self.dispatched
        self.reads.append((part.low, part.high))
        yield b"".join(self.records[part.low : part.high])

    def send_one(self, message: Message, queue: MessageQueue) -> Any:
        if queue == OTHER:
            self.notes.append(Entry.decode(bytes(message.body)))
            return None
        assert queue == HOME
        self.exists = True
        self.put(message.body)
        return SimpleNamespace(queue_offset=len(self.records) - 1)

    def put(self, body: bytes) -> None:
        properties = encode_properties({"UNIQ_KEY": f"M{len(self.records)}"})
        stored = {"queue_offset": len(self.records), "body": body, "properties": properties}
        self.records.append(record_at(0, topic=HOME.topic.encode(), store_timestamp=int(self.now_ms), **stored))

    def fill(self, *entries: Entry) -> Topic:
        for entry in entries:
            self.put(entry.encode())
        self.dispatched = len(self.records)
        return self


def opened(topic: Topic, **changed: Any) -> LedgerTopic:
    return LedgerTopic(SinkOptions(group="g", settle_ms=100, patience_ms=1000, **changed), topic)  # type: ignore[arg-type]


def done(batch_id: int, sink_id: str = "q") -> Entry:
    return Entry(Kind.DONE, Batch(sink_id, batch_id))


def test_an_entry_is_read_before_append_returns() -> None:
    topic = Topic()
    ledger = opened(topic)
    assert ledger.append(Entry(Kind.DECISION, Batch("q", 3), "me")) == 0
    assert (topic.dispatched, ledger.progress(Batch("q", 3)).decided_by, ledger.stored_ms(0)) == (1, "me", 0)


def test_the_first_entry_makes_the_topic() -> None:
    topic = Topic(exists=False)
    ledger = opened(topic)
    assert not ledger.progress(Batch("q", 0)).is_known
    assert ledger.last_batches("q") == (0, None)
    ledger.append(done(0))
    assert ledger.progress(Batch("q", 0)).is_done


def test_brokers_without_the_ledger_know_its_home_before_the_first_decision() -> None:
    topic = Topic(exists=False)
    opened(topic).append(done(0))
    assert [(note.kind, note.claimant) for note in topic.notes] == [(Kind.HOME, "broker-a")]
    opened(topic).append(done(1))
    assert len(topic.notes) == 1, "once"


@pytest.mark.parametrize("has_expired", [False, True])
def test_no_second_ledger_is_made_while_the_broker_of_the_first_is_away(has_expired: bool) -> None:
    topic = Topic(exists=False)
    opened(topic).append(done(0))
    topic.away, topic.has_expired = {"broker-a"}, has_expired
    for ask in (lambda: opened(topic).append(done(0)), lambda: opened(topic).progress(Batch("q", 0))):
        begun_ms = topic.now_ms
        with pytest.raises(ClientError, match=r"is on broker .*, which has no route: start it"):
            ask()
        assert topic.now_ms - begun_ms >= OPTIONS.patience_ms
    assert len(topic.notes) == 1
    topic.away = set()
    assert opened(topic).progress(Batch("q", 0)).is_done


def test_a_ledger_of_an_operator_is_noted_elsewhere_too() -> None:
    topic = Topic()
    opened(topic).append(done(0))
    assert [note.claimant for note in topic.notes] == ["broker-a"]


def test_a_topic_that_is_missed_is_waited_for_and_then_an_error() -> None:
    topic = Topic(exists=False)
    with pytest.raises(ClientError, match=r"topic rmqkit-ledger-g, .* the batches before q/7, has no route: start its"):
        opened(topic).progress(Batch("q", 7))
    assert topic.now_ms >= OPTIONS.patience_ms
    assert not opened(topic, fail_on_ledger_loss=False).progress(Batch("q", 7)).is_known


def test_what_is_old_is_read_back_until_the_sink_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_WINDOW_COUNT", 10)
    topic = Topic().fill(done(5), *(done(number, "other") for number in range(35)))
    ledger = opened(topic)
    assert ledger.progress(Batch("q", 5)).is_done
    assert topic.reads == [(0, 1), (26, 36), (16, 26), (6, 16), (0, 6)]
    assert not ledger.progress(Batch("q", 6)).is_done
    assert topic.reads[5:] == []  # an earlier batch of the sink is known: what is not here does not exist


def test_a_sink_that_brokers_have_forgotten_is_an_error() -> None:
    topic = Topic().fill(*(done(number, "other") for number in range(5)))
    assert not opened(topic).progress(Batch("q", 7)).is_known
    topic.low = 2
    with pytest.raises(ClientError, match=r"no entry of sink q any more: if the checkpoint has commits/6 and batch 7"):
        opened(topic).progress(Batch("q", 7))
    assert not opened(topic, fail_on_ledger_loss=False).progress(Batch("q", 7)).is_known


def test_what_is_kept_is_bounded_and_can_be_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_KEPT_COUNT", 10)
    monkeypatch.setattr(module, "_WINDOW_COUNT", 10)
    topic = Topic()
    ledger = opened(topic)
    for number in range(50):
        ledger.append(done(number))
    assert len(ledger.entries) <= 20
    assert ledger.progress(Batch("q", 0)).is_done


def test_the_newest_batches_are_known() -> None:
    topic = Topic().fill(done(100), done(300), Entry(Kind.DECISION, Batch("q", 400)), done(900, "other"))
    assert opened(topic).last_batches("q") == (300, 400)
    assert opened(topic).last_batches("other") == (900, None)


def test_half_messages_are_read_when_they_are_needed() -> None:
    halves = [Half("0/1", "T", "broker-a", -1, 5, 700)]
    topic = Topic().fill(Entry(Kind.PART, Batch("q", 0), halves=tuple(pack_halves(halves))))
    ledger = opened(topic)
    assert not ledger.progress(Batch("q", 0)).is_decided
    assert [written.entry.halves for written in ledger.entries] == [()]
    assert ledger.halves(0) == halves

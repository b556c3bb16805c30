"""The reports of a producer: hooks, the trace topic, its status. Source: behaviour.md §7.6, §7.11, §9.7."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from rmqkit import Message, MessageIllegal, PeerRefused, Producer, TransactionState
from rmqkit.client.observe.hooks import Hook, Sending, SendOutcome, TransactionEnd
from rmqkit.client.runtime.settings import Compressing, SendLimits, Tracing
from rmqkit.protocol.trace import EndTransactionTrace, PublishTrace, RecallTrace, Trace, TracedType, decode_traces
from tests.interop.suite.scene import Scene
from tests.patience import producing


class Noted(Hook):
    """A hook that records its calls, and adds a property to every message."""

    def __init__(self) -> None:
        self.sent: list[tuple[Sending, SendOutcome]] = []
        self.ended: list[TransactionEnd] = []

    def sending(self, sending: Sending) -> Callable[[SendOutcome], None]:
        sending.properties["added"] = "by a hook"
        return lambda outcome: self.sent.append((sending, outcome))

    def transaction_ended(self, end: TransactionEnd) -> None:
        self.ended.append(end)


class Failing(Hook):
    """A hook that raises."""

    def sending(self, sending: Sending) -> None:
        raise ValueError("a hook of the program's")


async def hooked(scene: Scene, *hooks: Hook) -> Producer:
    producer = Producer(scene.group, scene.namesrv, settings=producing(), hooks=hooks)
    await scene.closing(producer).start()
    return producer


async def test_a_hook_is_notified_of_every_send_and_how_it_ended(scene: Scene) -> None:
    """behaviour.md §7.6: send hooks before and after."""
    await scene.create_topic()
    noted = Noted()
    producer = await hooked(scene, noted)
    message = Message(topic=scene.topic, body=b"x" * 10)
    result = await producer.send(message)
    ((sending, outcome),) = noted.sent
    assert (sending.group, sending.messages, sending.is_batch) == (scene.group, [message], False)
    assert (outcome.result, outcome.error, outcome.body_bytes) == (result, None, 10)
    assert (outcome.address, outcome.region_id) == (scene.peer.broker_addr, "DefaultRegion")


async def test_what_a_hook_adds_is_sent_with_the_message(scene: Scene) -> None:
    """behaviour.md §7.6."""
    await scene.create_topic()
    producer = await hooked(scene, Noted())
    await producer.send(Message(topic=scene.topic, body=b"x", properties={"own": "1"}))
    await producer.send_batch([Message(topic=scene.topic, body=b"x")] * 2)
    await producer.send_many([Message(topic=scene.topic, body=b"x")] * 2)
    assert [one.properties["added"] for one in await scene.stored(5)] == ["by a hook"] * 5


async def test_a_hook_is_notified_of_failures(scene: Scene) -> None:
    """behaviour.md §7.6."""
    await scene.create_topic()
    noted = Noted()
    producer = await hooked(scene, noted)
    for body, error in ((b"", MessageIllegal), (bytes(5 << 20), MessageIllegal)):
        with pytest.raises(error):
            await producer.send(Message(topic=scene.topic, body=body))
    producer.settings.limits = SendLimits(message_bytes_max=64 << 20)
    producer.settings.compression = Compressing(body_bytes_min=64 << 20)
    with pytest.raises(PeerRefused):
        await producer.send(Message(topic=scene.topic, body=bytes(5 << 20)))
    assert [type(outcome.error) for _, outcome in noted.sent] == [MessageIllegal, MessageIllegal, PeerRefused]


async def test_a_hook_that_raises_changes_nothing(scene: Scene) -> None:
    """behaviour.md §7.6: errors are logged."""
    await scene.create_topic()
    noted = Noted()
    producer = await hooked(scene, Failing(), noted)
    await producer.send(Message(topic=scene.topic, body=b"x"))
    assert len(await scene.stored(1)) == len(noted.sent) == 1


async def test_a_hook_is_notified_how_transactions_end(scene: Scene) -> None:
    """behaviour.md §7.6: end-transaction hooks."""
    await scene.create_topic()
    noted = Noted()
    producer = await scene.transaction_producer(
        lambda message, state: state, lambda message: TransactionState.COMMIT, hooks=[noted]
    )
    for state in (TransactionState.COMMIT, TransactionState.ROLLBACK):
        await producer.send_in_transaction(Message(topic=scene.topic, body=b"x"), state)
    assert [end.state for end in noted.ended] == ["COMMIT_MESSAGE", "ROLLBACK_MESSAGE"]
    assert [sending.is_half for sending, _ in noted.sent] == [True, True]
    assert not any(end.is_checked for end in noted.ended)


# -- the trace topic


async def traces(scene: Scene, count: int) -> list[Trace]:
    """Return the records in the scene's trace topic."""
    found: list[Trace] = []
    while len(found) < count:
        messages = await scene.stored(1, f"{scene.topic}-trace")
        found = [trace for message in messages for trace in decode_traces(message.body)]
    return found


async def traced(scene: Scene, *, recalls: bool = False, **settings: Any) -> Producer:
    await scene.create_topic()
    topic = await scene.create_topic(f"{scene.topic}-trace")
    return await scene.producer(trace=Tracing(topic=topic, batch_count=1, recalls=recalls), **settings)


async def test_a_traced_producer_writes_its_sends_to_the_trace_topic(scene: Scene) -> None:
    """behaviour.md §7.11, §9.7: Pub."""
    producer = await traced(scene)
    result = await producer.send(Message(topic=scene.topic, body=b"x" * 7, tags="A", keys=["k"]))
    (trace,) = await traces(scene, 1)
    assert isinstance(trace, PublishTrace)
    assert (trace.group, trace.topic, trace.tags, trace.keys) == (scene.group, scene.topic, "A", "k")
    assert (trace.msg_id, trace.offset_msg_id) == (result.msg_id, result.offset_msg_id)
    assert (trace.body_bytes, trace.msg_type, trace.success) == (7, TracedType.NORMAL, True)
    assert (trace.store_host, trace.region_id) == (scene.peer.broker_addr, "DefaultRegion")


async def test_trace_messages_are_found_by_the_message_id_they_report_of(scene: Scene) -> None:
    """behaviour.md §7.11: keys = message ids and keys."""
    producer = await traced(scene)
    result = await producer.send(Message(topic=scene.topic, body=b"x", keys=["k"]))
    (message,) = await scene.stored(1, f"{scene.topic}-trace")
    assert set(message.keys) == {result.msg_id, "k"}


async def test_the_kind_of_a_message_is_traced(scene: Scene) -> None:
    """behaviour.md §9.7: ordinals."""
    producer = await traced(scene)
    await producer.send(Message(topic=scene.topic, body=b"x", delay_level=1))
    await producer.send(Message(topic=scene.topic, body=b"x", sharding_key="k"))
    kinds = {trace.msg_type for trace in await traces(scene, 2) if isinstance(trace, PublishTrace)}
    assert kinds >= {TracedType.DELAYED}


async def test_failed_and_one_way_sends_are_not_traced(scene: Scene) -> None:
    """behaviour.md §7.11."""
    producer = await traced(scene)
    with pytest.raises(MessageIllegal):
        await producer.send(Message(topic=scene.topic, body=b""))
    await producer.send_one_way(Message(topic=scene.topic, body=b"one way"))
    result = await producer.send(Message(topic=scene.topic, body=b"x"))
    await producer.close()
    assert [getattr(trace, "msg_id", "") for trace in await traces(scene, 1)] == [result.msg_id]


async def test_closing_writes_the_traces_that_wait(scene: Scene) -> None:
    """behaviour.md §7.11: shutdown flushes."""
    await scene.create_topic()
    topic = await scene.create_topic(f"{scene.topic}-trace")
    producer = await scene.producer(trace=Tracing(topic=topic))
    results = [await producer.send(Message(topic=scene.topic, body=b"x")) for _ in range(3)]
    await producer.close()
    found = [getattr(trace, "msg_id", "") for trace in await traces(scene, 3)]
    assert found == [result.msg_id for result in results]


async def test_the_end_of_a_transaction_is_traced(scene: Scene) -> None:
    """behaviour.md §9.7: EndTransaction."""
    await scene.create_topic()
    topic = await scene.create_topic(f"{scene.topic}-trace")
    producer = await scene.transaction_producer(
        lambda message, state: state,
        lambda message: TransactionState.COMMIT,
        trace=Tracing(topic=topic, batch_count=1),
    )
    result = await producer.send_in_transaction(Message(topic=scene.topic, body=b"x"), TransactionState.COMMIT)
    ends = [trace for trace in await traces(scene, 2) if isinstance(trace, EndTransactionTrace)]
    assert [(end.msg_id, end.state, end.from_check) for end in ends] == [(result.sent.msg_id, "COMMIT_MESSAGE", False)]


async def test_a_recall_can_be_traced(scene: Scene) -> None:
    """behaviour.md §9.7: Recall."""
    producer = await traced(scene, recalls=True)
    result = await producer.send(Message(topic=scene.topic, body=b"x", delay=20))
    assert result.recall_handle is not None
    await producer.recall(result.recall_handle)
    recalls = [trace for trace in await traces(scene, 2) if isinstance(trace, RecallTrace)]
    assert [(recall.msg_id, recall.success) for recall in recalls] == [(result.msg_id, True)]


# -- the status


async def test_a_producer_reports_its_brokers_and_what_is_under_way(scene: Scene) -> None:
    """behaviour.md §7.1, §7.5."""
    await scene.create_topic()
    producer = await scene.producer()
    await producer.send(Message(topic=scene.topic, body=b"x"))
    sends = [asyncio.create_task(producer.send(Message(topic=scene.topic, body=b"x"))) for _ in range(5)]
    await asyncio.sleep(0)
    status = producer.status()
    assert (status.group, status.name_servers) == (scene.group, [scene.namesrv])
    assert [(one.name, one.address, one.is_connected) for one in status.brokers] == [
        (scene.broker_name, scene.peer.broker_addr, True)
    ]
    assert status.sends_under_way == 5
    await asyncio.gather(*sends)
    assert producer.status().sends_under_way == 0


async def test_sends_beyond_the_bound_wait_in_line(scene: Scene) -> None:
    """behaviour.md §7.6: back-pressure."""
    await scene.create_topic()
    producer = await scene.producer(limits=SendLimits(sends_max=10))
    sends = [asyncio.create_task(producer.send(Message(topic=scene.topic, body=b"%d" % i))) for i in range(50)]
    await asyncio.sleep(0)
    assert producer.status().sends_under_way == 10
    await asyncio.gather(*sends)
    assert sorted(int(one.body) for one in await scene.stored(50)) == list(range(50))

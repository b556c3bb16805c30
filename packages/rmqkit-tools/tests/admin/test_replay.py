"""Replays that end in the middle of a chunk, and what a replayed message keeps."""

from __future__ import annotations

import asyncio
import json
from contextlib import closing
from functools import partial

import msgspec
import pytest

from rmqkit.admin.messages.sending import Stop
from rmqkit.admin.replay.dead import origin
from rmqkit.admin.replay.replay import Replay
from rmqkit.admin.replay.selection import Selection
from rmqkit.admin.replay.sources import Picked
from rmqkit.admin.replay.state import Audit, State
from rmqkit.client.observe.hooks import SendResult, SendStatus
from rmqkit.errors import ConnectionLost, MessageIllegal, SendFailed, SettingsError
from rmqkit.protocol.schemas.clients import MessageQueue
from tests.client.messages import received


class Target:
    """A cluster of one queue: producer and consumer in one.

    Attributes:
        stored: unique keys in the order of the queue.
        fails_at: sending a message with this body fails, of those behind it in a chunk as well.
        refused: bodies that are illegal.
    """

    def __init__(self):
        self.stored = {}
        self.fails_at = None
        self.refused = ()

    async def send(self, message, *, queue=None):
        if self.fails_at is not None and int(message.body) >= self.fails_at:
            raise SendFailed(message.topic, ["b"], ConnectionLost("b:1", "cut"))
        if int(message.body) in self.refused:
            raise MessageIllegal("too large")
        assert message.msg_id not in self.stored, "sent twice"
        self.stored[message.msg_id] = received(
            len(self.stored), message.body, topic=message.topic, msg_id=message.msg_id
        )
        queue = MessageQueue(message.topic, "b", 0)
        return SendResult(SendStatus.SEND_OK, message.msg_id, "00", queue, len(self.stored) - 1)

    async def send_batch(self, messages, *, queue=None):
        if any(int(one.body) in self.refused for one in messages):
            raise MessageIllegal("one of them is too large")
        sent = [await self.send(one) for one in messages]
        return msgspec.structs.replace(sent[0], msg_id=",".join(one.msg_id for one in sent))

    async def view_message(self, topic, msg_id):
        return self.stored.get(msg_id)


class Numbers:
    """A source of messages 0 to ``count`` - 1; several may lie at one place, as in an inner batch."""

    def __init__(self, count, at_one_place=1):
        self.count = count
        self.at_one_place = at_one_place

    async def lanes(self):
        return {"b:0": (0, self.count)}

    async def read(self, lanes):
        ((low, end),) = lanes.values()
        for i in range(low, end):
            behind = (i // self.at_one_place + 1) * self.at_one_place
            yield Picked(received(i, b"%d" % i), "b:0", behind)


async def run(target, source, path):
    state = State.load(path, "task")
    with closing(Audit(path.with_name("audit"))) as audit:
        replay = Replay(
            source, target, target, state or await State.begin("task", source),
            target="To", state_path=path, audit=audit, is_unsure=state is not None,
        )  # fmt: skip
        await replay.run(Stop())
        return replay


@pytest.mark.parametrize("at_one_place", [1, 7, 300])
@pytest.mark.real_time
async def test_what_a_broken_chunk_has_sent_is_found_and_not_sent_again(tmp_path, at_one_place):
    target, source, path = Target(), Numbers(900, at_one_place), tmp_path / "state"
    for fails_at in (100, 400, 850):
        target.fails_at = fails_at
        with pytest.raises(SendFailed):
            await run(target, source, path)
        assert sorted(int(one.body) for one in target.stored.values()) == list(range(fails_at))
    target.fails_at = None
    stale = State.load(path, "task")
    stale.lanes["b:0"] = (0, 900)  # what a power cut brings back
    stale.save(path)
    replay = await run(target, source, path)
    assert replay.found == 850 and replay.state.is_done
    assert sorted(int(one.body) for one in target.stored.values()) == list(range(900))
    places = [json.loads(line)["place"] for line in (tmp_path / "audit").read_text().splitlines()]
    assert places == [f"b:0:{i}" for i in range(900)]


@pytest.mark.real_time
async def test_a_message_that_no_broker_takes_is_passed_over_and_reported(tmp_path):
    target, told = Target(), []
    target.refused = (3, 5)
    state = await State.begin("task", Numbers(8))
    audit = Audit(tmp_path / "audit")
    await Replay(
        Numbers(8), target, target, state, target="To", audit=audit, on_chunk=lambda *one: told.append(one)
    ).run(Stop())
    audit.close()
    ((sent, failures),) = told
    assert (sent, list(map(str, failures)), state.sent, state.failed) == (6, ["too large"] * 2, 6, 2)
    lines = [json.loads(line) for line in (tmp_path / "audit").read_text().splitlines()]
    assert [line["msgId"] for line in lines if line.get("error") == "too large"] == ["id-3", "id-5"]


@pytest.mark.real_time
async def test_a_stop_waits_for_the_chunk(tmp_path):
    target, path = Target(), tmp_path / "state"
    source, asked = Numbers(1000), []

    async def stopped():
        stop = Stop()
        state = await State.begin("task", source)

        def ask(sent, failures):
            asked.append(sent)
            stop.ask()

        await Replay(source, target, target, state, target="To", state_path=path, on_chunk=ask).run(stop)

    with pytest.raises(asyncio.CancelledError):
        await asyncio.create_task(stopped())
    assert asked == [256] and len(target.stored) == 256
    assert State.load(path, "task").lanes == {"b:0": (256, 1000)}
    assert (await run(target, source, path)).found == 0
    assert len(target.stored) == 1000


def test_a_torn_line_of_an_audit_is_taken_off(tmp_path):
    path = tmp_path / "audit"
    path.write_bytes(b'{"time":1,"newMsgId":"r/a"}\n{"time":2,"newMsg')
    audit = Audit(path)
    audit.write([{"time": 3, "newMsgId": "r/a"}, {"time": 4, "newMsgId": "r/b"}], may_have=True)
    audit.close()
    assert path.read_bytes() == b'{"time":1,"newMsgId":"r/a"}\n{"time":4,"newMsgId":"r/b"}\n'


@pytest.mark.parametrize("content", [b"x", b"text\n", b'{"time":1}\nx', b'{"tim":'])
def test_another_file_is_no_audit_and_left_as_it_is(tmp_path, content):
    path = tmp_path / "audit"
    path.write_bytes(content)
    with pytest.raises(SettingsError, match="does not end with a line of an audit"):
        Audit(path)
    assert path.read_bytes() == content


@pytest.mark.parametrize("name", ["state", "audit"])
def test_a_full_disk_is_reported_with_the_file(tmp_path, name):
    path = tmp_path / name
    with open("/dev/full", "wb", buffering=0) as full:
        if name == "state":
            path.with_name("state.tmp").symlink_to("/dev/full")
            write = partial(State(task="one", replay_id="r", lanes={}).save, path)
        else:
            audit = Audit(path)
            audit.close()
            audit._file = full
            write = partial(audit.write, [{"newMsgId": "r/a"}], may_have=False)
        with pytest.raises(OSError, match="No space left on device") as caught:
            write()
    assert caught.value.filename == str(path)


def test_a_state_is_used_for_its_task_alone(tmp_path):
    path = tmp_path / "state"
    assert State.load(path, "one") is None
    State(task="one", replay_id="r", lanes={"log": (1, 2)}).save(path)
    assert State.load(path, "one").lanes == {"log": (1, 2)}
    with pytest.raises(SettingsError, match="is the state of another replay, one: name another file for two"):
        State.load(path, "two")


@pytest.mark.parametrize(
    ("topic", "properties", "found"),
    [
        ("%DLQ%g", {"RETRY_TOPIC": "T"}, "T"),
        ("%DLQ%g", {"RETRY_TOPIC": "%RETRY%g", "DLQ_ORIGIN_TOPIC": "T"}, "T"),
        ("%DLQ%g", {}, None),
        ("T", {}, "T"),
        ("T", {"RETRY_TOPIC": "before"}, "T"),
    ],
)
def test_a_dead_letter_says_where_it_came_from(topic, properties, found):
    assert origin(received(0, topic=topic, properties=properties)) == found


MESSAGE = received(7, topic="T", msg_id="id", store_timestamp=1000, properties={"TAGS": "A", "KEYS": "k1 k2", "n": "5"})


@pytest.mark.parametrize(
    ("selection", "is_selected"),
    [
        (Selection(), True),
        (Selection(topic="T", begin_ms=1000, end_ms=1000, keys=("k2", "x"), tags="B || A", sql="n = 5"), True),
        (Selection(topic="U"), False),
        (Selection(begin_ms=1001), False),
        (Selection(end_ms=999), False),
        (Selection(keys=("id",)), True),
        (Selection(keys=("k",)), False),
        (Selection(tags="B"), False),
        (Selection(sql="n > 5"), False),
        (Selection(sql="missing > 5"), False),
    ],
)
def test_a_selection_takes_what_meets_all_of_it(selection, is_selected):
    assert selection.test()(MESSAGE) is is_selected


@pytest.mark.parametrize("topic", ["%RETRY%g", "%DLQ%g", "SCHEDULE_TOPIC_XXXX", "rmq_sys_wheel_timer"])
def test_without_a_topic_those_of_applications_are_selected(topic):
    message = msgspec.structs.replace(MESSAGE, topic=topic)
    assert not Selection().test()(message)
    assert Selection(topic=topic).test()(message)


@pytest.mark.parametrize("selection", [Selection(sql="n >"), Selection(tags="||")])
def test_an_expression_that_cannot_be_understood_is_refused(selection):
    with pytest.raises(SettingsError, match="replay: "):
        selection.test()

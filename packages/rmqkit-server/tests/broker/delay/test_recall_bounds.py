"""Which recalls are accepted, and the marker that they store (behaviour.md §3.9)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from rmqkit.broker.delay.recall import RecallHandlers
from rmqkit.broker.durability import Outcome
from rmqkit.broker.handlers import OwnAddress
from rmqkit.broker.settings import BrokerRole, BrokerSettings
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import decode_fields, request
from rmqkit.protocol.ids import RecallHandle, encode_recall_handle
from rmqkit.protocol.names import TIMER_TOPIC
from rmqkit.protocol.properties import decode_properties
from rmqkit.protocol.schemas.send import RecallMessageRequest
from rmqkit.store.message_store import PutResult, PutStatus
from tests.broker.delay.stand import NOW_MS, Stand
from tests.store.stores import HOST, HOST_V6

OK, ILLEGAL, UNAVAILABLE = ResponseCode.SUCCESS, ResponseCode.ILLEGAL_OPERATION, ResponseCode.SERVICE_NOT_AVAILABLE


class Recalls:
    """The handler of recalls for topic T of broker b."""

    def __init__(self, root):
        self.stand = Stand(root)
        self.settings = BrokerSettings(broker_name="b", recall_messages=True, region_id="here")
        self.context = SimpleNamespace(
            clock=self.stand.clock,
            durability=None,
            identity=OwnAddress("10.0.0.1", HOST),
            settings=self.settings,
            store=self.stand.store,
            store_settings=self.stand.settings,
            timer=self.stand.timer,
            topics={"T": object()},
        )
        self.handlers = RecallHandlers(self.context)

    def answer(self, deliver_ms=NOW_MS + 5000, *, topic="T", handle_topic="T", broker="b", text=None):
        handle = RecallHandle(handle_topic, broker, deliver_ms, "K")
        text = encode_recall_handle(handle) if text is None else text
        header = RecallMessageRequest(producer_group="p", topic=topic, recall_handle=text)
        connection = SimpleNamespace(peer_host=HOST_V6)
        return self.handlers.recall(connection, request(RequestCode.RECALL_MESSAGE, header))


@pytest.fixture
async def recalls(tmp_path):
    recalls = Recalls(tmp_path)
    yield recalls
    recalls.stand.close()


@pytest.mark.parametrize(
    ("ahead_ms", "code"), [(-1, ILLEGAL), (0, OK), (5000, OK), (999_998, OK), (999_999, ILLEGAL), (1_000_000, ILLEGAL)]
)
async def test_a_recall_is_for_a_time_that_is_not_over_and_not_beyond_the_longest_delay(ahead_ms, code, recalls):
    answer = recalls.answer(NOW_MS + ahead_ms)
    assert answer.code == code
    assert (answer.remark == "recall failed, timestamp invalid") is (code == ILLEGAL)
    assert recalls.stand.store.max_offset(TIMER_TOPIC, 0) == (code == OK)


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({}, OK),
        ({"recall_messages": False}, ResponseCode.NO_PERMISSION),
        ({"broker_role": BrokerRole.SLAVE}, ResponseCode.SLAVE_NOT_AVAILABLE),
        ({"broker_permission": 4, "recall_unwritable": False}, UNAVAILABLE),
        ({"broker_permission": 4, "recall_unwritable": True}, OK),
        ({"broker_permission": 2}, OK),
        ({"accept_sends_from_ms": NOW_MS}, OK),
        ({"accept_sends_from_ms": NOW_MS + 1}, UNAVAILABLE),
    ],
)
async def test_a_broker_accepts_recalls_when_it_accepts_sends(settings, code, recalls):
    for name, value in settings.items():
        setattr(recalls.settings, name, value)
    assert recalls.answer().code == code


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"topic": "U", "handle_topic": "U"}, ResponseCode.TOPIC_NOT_EXIST),
        ({"handle_topic": "U"}, ILLEGAL),
        ({"broker": "c"}, ILLEGAL),
        ({"text": "rubbish"}, ILLEGAL),
        ({"text": ""}, ILLEGAL),
    ],
)
async def test_a_handle_is_for_its_topic_and_broker(fields, code, recalls):
    assert recalls.answer(**fields).code == code


async def test_a_recall_stores_a_marker_for_the_second_of_its_message(recalls):
    answer = recalls.answer(NOW_MS + 5000)
    assert decode_fields(answer) == {"msgId": "K", "MSG_REGION": "here"}
    (record,) = recalls.stand.records(TIMER_TOPIC, 0)
    assert decode_properties(record.properties) == {
        "PGROUP": "p",
        "BORN_TIMESTAMP": str(NOW_MS),
        "TAGS": "_RECALL_TAG_",
        "UNIQ_KEY": "K",
        "TIMER_DEL_UNIQKEY": "K",
        "TIMER_DELIVER_MS": str(NOW_MS + 5001),
        "TIMER_OUT_MS": str(NOW_MS + 5000),
        "REAL_TOPIC": "T",
        "REAL_QID": "0",
    }
    assert (record.body, record.flag, record.sys_flag & ~0x30) == (b"0", 0, 0)
    assert (record.born_host, record.store_host, record.born_timestamp) == (HOST_V6, HOST, NOW_MS)


@pytest.mark.parametrize("has_timer", [True, False])
async def test_a_marker_that_cannot_be_stored_is_a_failure(has_timer, recalls, monkeypatch):
    if has_timer:
        refused = PutResult(PutStatus.SERVICE_NOT_AVAILABLE)
        monkeypatch.setattr(recalls.stand.store, "put", lambda message: refused)
    else:
        recalls.context.timer = None
    answer = recalls.answer()
    assert (answer.code, answer.remark) == (ResponseCode.SYSTEM_ERROR, "recall failed, execute error")
    assert decode_fields(answer) == {"MSG_REGION": "here"}


@pytest.mark.parametrize(
    ("outcome", "code"),
    [(Outcome.DURABLE, OK), (Outcome.TIMED_OUT, OK), (Outcome.FAILED, ResponseCode.SYSTEM_ERROR)],
)
async def test_a_recall_is_answered_when_its_marker_is_safe(outcome, code, recalls):
    waited = []

    async def wait(end_offset):
        waited.append(end_offset)
        return outcome, ""

    safe = [0]
    recalls.context.durability = SimpleNamespace(has=lambda end_offset: end_offset <= safe[0], wait=wait)
    assert (await recalls.answer()).code == code
    assert waited == [recalls.stand.store.max_physical_offset]
    safe[0] = 1 << 40
    assert recalls.answer().code == OK

"""The handles of popped messages. Source: remoting.md §4.6.1, behaviour.md §4.7."""

from __future__ import annotations

import pytest

from rmqkit.client.pop.session import Receipt, batch_acks, give_handles, receipt_of
from rmqkit.errors import ClientError, HeaderError
from rmqkit.protocol.ids import decode_pop_handle
from rmqkit.protocol.schemas.clients import MessageQueue
from rmqkit.protocol.schemas.pop import PopMessageResponse
from tests.client.messages import received

QUEUE = MessageQueue("T", "broker-a", -1)
TIMES = {"pop_time": 1_795_224_862_948, "invisible_time": 60_000}


def handle(message):
    return message.properties["POP_CK"]


def test_messages_get_the_handle_of_the_spec():
    message = received(4)
    header = PopMessageResponse(**TIMES, start_offset_info="0 0 0", msg_offset_info="0 0 0,1,2,3,4")
    give_handles([message], header, QUEUE)
    assert handle(message) == "0 1795224862948 60000 0 0 broker-a 0 4"
    assert message.properties["1ST_POP_TIME"] == "1795224862948"


def test_each_queue_has_its_own_start():
    messages = [received(7, queue_id=1), received(12, queue_id=2), received(8, queue_id=1)]
    header = PopMessageResponse(**TIMES, revive_qid=6, start_offset_info="0 1 5;0 2 12;1 0 3")
    give_handles(messages, header, QUEUE)
    assert [handle(one) for one in messages] == [
        "5 1795224862948 60000 6 0 broker-a 1 7",
        "12 1795224862948 60000 6 0 broker-a 2 12",
        "5 1795224862948 60000 6 0 broker-a 1 8",
    ]


def test_brokers_that_report_no_starts_mean_the_first_message_of_each_queue():
    messages = [received(7), received(8), received(3, queue_id=1)]
    give_handles(messages, PopMessageResponse(**TIMES), QUEUE)
    assert [handle(one).split()[0] for one in messages] == ["7", "7", "3"]


@pytest.mark.parametrize(("topic", "mark"), [("%RETRY%G_T", "1"), ("%RETRY%G+T", "2")])
def test_a_message_of_a_retry_topic_gets_its_own_topic_and_is_acknowledged_in_the_other(topic, mark):
    message = received(9, topic=topic, properties={"1ST_POP_TIME": "5"})
    give_handles([message], PopMessageResponse(**TIMES, start_offset_info=f"0 0 1;{mark} 0 8"), QUEUE)
    assert (message.topic, handle(message)) == ("T", f"8 1795224862948 60000 0 {mark} broker-a 0 9")
    assert message.properties["1ST_POP_TIME"] == "5"
    assert receipt_of(message).real_topic("G", "") == topic


def test_a_retry_topic_names_the_namespace_of_its_topic():
    receipt = Receipt("T", decode_pop_handle("8 1 60000 0 1 broker-a 0 9"))
    assert receipt.real_topic("G", "NS") == "%RETRY%G_NS%T"  # the one before the group is for all requests


def test_handles_of_the_broker_stay():
    message = received(9, properties={"POP_CK": "1 2 3 4 1 broker-a 0 9"})
    give_handles([message], PopMessageResponse(**TIMES, start_offset_info="0 0 7"), QUEUE)
    assert handle(message) == "1 2 3 4 1 broker-a 0 9"


def test_an_answer_with_handles_that_are_none_is_refused():
    with pytest.raises(HeaderError, match="must have 7 words"):
        give_handles([received(9, properties={"POP_CK": "1 2"})], PopMessageResponse(**TIMES), QUEUE)


def test_deliveries_in_order_are_counted_by_message_or_by_queue():
    messages = [received(1), received(2), received(1, queue_id=1)]
    counts = "0 0 4;0 qo0%2 3"
    give_handles(messages, PopMessageResponse(**TIMES, order_count_info=counts), QUEUE)
    assert [one.reconsume_times for one in messages] == [4, 3, 0]


def test_a_start_time_of_somebody_else_is_removed():
    message = received(1, properties={"CONSUME_START_TIME": "5"})
    give_handles([message], PopMessageResponse(**TIMES), QUEUE)
    assert "CONSUME_START_TIME" not in message.properties


def test_a_message_that_was_not_popped_has_no_receipt():
    with pytest.raises(ClientError, match="message id-1 has no property POP_CK: it was not popped"):
        receipt_of(received(1))


def test_a_handle_without_offset_is_completed():
    message = received(9, properties={"POP_CK": "1 2 3 4 0 broker-a 0"})
    assert receipt_of(message).queue_offset == 9


def test_acks_of_one_pop_and_queue_are_one_entry():
    texts = (
        "8 100 60000 2 0 broker-a 0 9",
        "8 100 60000 2 0 broker-a 0 17",
        "8 100 60000 2 0 broker-a 1 8",  # another queue
        "8 101 60000 2 0 broker-a 0 10",  # another pop
        "8 100 60000 2 1 broker-a 0 9",  # through the retry topic
    )
    acks = batch_acks("G", [Receipt("T", decode_pop_handle(text)) for text in texts])
    assert [(one.retry, one.queue_id, one.pop_time, one.acked) for one in acks] == [
        ("0", 0, 100, b"\x02\x02"),  # bits 1 and 9: "AgI="
        ("0", 1, 100, b"\x01"),
        ("0", 0, 101, b"\x04"),
        ("1", 0, 100, b"\x02"),
    ]
    assert {(one.group, one.topic, one.start_offset, one.revive_queue_id) for one in acks} == {("G", "T", 8, 2)}

"""Answers that are put together from bytes are what the schema's messages encode to."""

from hypothesis import given
from hypothesis import strategies as st

from rmqkit.proxy.schema.messages import message_class
from rmqkit.proxy.schema.status import OK, acked_answer, sent_answer

TEXTS = st.text(max_size=20) | st.text("aé", min_size=100, max_size=200)


def test_the_bytes_of_an_answer():
    assert sent_answer("ID1", 300).hex() == ("0a0808a09c0112024f4b12170a0808a09c0112024f4b12034944311a0349443120ac02")


@given(TEXTS.filter(bool), st.integers(0, (1 << 63) - 1))
def test_what_is_answered_to_a_send(message_id, queue_offset):
    entry = {"status": OK, "message_id": message_id, "transaction_id": message_id, "offset": queue_offset}
    wanted = message_class("SendMessageResponse")(status=OK, entries=[entry])
    assert sent_answer(message_id, queue_offset) == wanted.SerializeToString()


@given(TEXTS, TEXTS.filter(bool))
def test_what_is_answered_to_an_ack(message_id, handle):
    entry = {"status": OK, "message_id": message_id, "receipt_handle": handle}
    wanted = message_class("AckMessageResponse")(status=OK, entries=[entry])
    assert acked_answer(message_id, handle) == wanted.SerializeToString()

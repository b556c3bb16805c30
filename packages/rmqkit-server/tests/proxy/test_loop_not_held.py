"""No gRPC call of any client blocks the event loop of a broker for long."""

from __future__ import annotations

import pytest

from rmqkit.proxy.schema.messages import methods
from rmqkit.proxy.transport.field_count import FIELDS_MAX, SMALL_BYTES, is_within
from tests.cpu import slowness
from tests.grpc_loop_held import held
from tests.loop_held import MAX_SECONDS, table

METHODS = {method.name: method.request for method in methods()}


@pytest.mark.slow
@pytest.mark.real_time
async def test_no_call_at_its_bounds_holds_the_loop(tmp_path):
    before = slowness()
    found = await held(tmp_path)
    print(table(found, 25))
    assert {one.name for one in found} >= {"AckMessage", "SendMessage", "QueryRoute", "ReceiveMessage", "Telemetry"}
    assert len(found) > 100
    # Other tests run beside this one and share its processor: `make loop-held`, alone, holds it to half of that.
    limit = 2 * MAX_SECONDS * max(before, slowness())
    assert [one for one in found if one.seconds > limit] == []


def encoded(name, **fields):
    return METHODS[name](**fields).SerializeToString()


def within(name, content):
    return is_within(METHODS[name].DESCRIPTOR, content)


def test_fields_are_counted_to_the_bound():
    entry = b"\x1a\x02\x0a\x00"  # an entry with an empty message id
    assert within("AckMessage", entry * FIELDS_MAX)
    assert not within("AckMessage", entry * (FIELDS_MAX + 1))
    assert within("AckMessage", b"\x1a\x00" * (SMALL_BYTES // 2)), "small messages are not looked at"


@pytest.mark.parametrize("count", [6000, 12_001])
def test_fields_of_messages_within_messages_count(count):
    properties = {f"{number:04}": "value" for number in range(count)}
    content = encoded("SendMessage", messages=[{"user_properties": properties}])
    assert within("SendMessage", content) is (count < FIELDS_MAX)
    addresses = {"addresses": [{"host": "a", "port": 1}] * count}
    assert within("QueryRoute", encoded("QueryRoute", endpoints=addresses)) is (count < FIELDS_MAX)


def test_what_sdks_send_at_most_is_within():
    handle = "0 1795000000000 60000 2 0 broker-a 3 123456 123456789"
    acks = [{"message_id": "0" * 34, "receipt_handle": handle}] * 10_000
    assert within("AckMessage", encoded("AckMessage", entries=acks))
    assert within("SendMessage", encoded("SendMessage", messages=[{"body": bytes(4 << 20)}]))
    system = {"message_id": "0" * 34, "keys": ["a", "b"], "tag": "t", "born_host": "h"}
    message = {"topic": {"name": "T"}, "body": b"x", "user_properties": {"a": "b"}, "system_properties": system}
    assert within("SendMessage", encoded("SendMessage", messages=[message] * 500))


@pytest.mark.parametrize("tail", [b"\x1a", b"\x1a\xff", b"\x1a\x7f", b"\x00\x01", b"\x0b", b"\xff" * 11, b"\x0d\x01"])
def test_what_cannot_be_read_is_left_to_the_decoder(tail):
    assert within("AckMessage", b"\x1a\x02\x0a\x00" * 5000 + tail)

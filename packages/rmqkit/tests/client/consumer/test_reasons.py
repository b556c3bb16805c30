"""Why a message is a dead letter: the properties that rmqkit's consumers write."""

from __future__ import annotations

import functools

import pytest

from rmqkit import ConsumeLater, Reject
from rmqkit.client.consumer.push import PushConsumer
from rmqkit.client.consumer.reasons import Reason, handler_name, text_of, traceback_of
from rmqkit.client.pop.consumer import PopConsumer
from rmqkit.client.producer.encode import encode_dead_letter
from rmqkit.client.runtime.settings import PushConsumerSettings, StartFrom
from rmqkit.protocol.message import ReceivedMessage
from rmqkit.protocol.properties import decode_properties
from tests.client.consumer.test_typed_bodies import dead_letters, running
from tests.client.messages import received

LAST = PushConsumerSettings(take_over_pause_ms=0, start_from=StartFrom.FIRST_OFFSET, retries_max=0)
KINDS = {
    "push": lambda address: PushConsumer("CG", address, settings=LAST),
    "ordered": lambda address: PushConsumer("CG", address, settings=LAST, ordered=True),
    "pop": lambda address: PopConsumer("CG", address, settings=LAST),
    "ordered pop": lambda address: PopConsumer("CG", address, settings=LAST, ordered=True),
}


class CardDeclined(Exception):
    pass


def charge() -> None:
    raise CardDeclined("card of order 17\ndeclined")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["raises", "later", "later from", "gives up"])
async def test_a_dead_letter_says_why_and_where(kind, way, tmp_path):
    async with running(tmp_path) as (address, producer):
        sent = await producer.send("Orders", b"17", tags="paid", keys=["k"], properties={"a": "b"})
        first = []
        consumer = KINDS[kind](address)

        @consumer.on("Orders")
        async def bill(message: ReceivedMessage) -> None:
            first.append((message.born_timestamp, message.born_host))
            match way:
                case "raises":
                    charge()
                case "later":
                    raise ConsumeLater
                case "gives up":
                    raise Reject("no such customer")
            try:
                charge()
            except CardDeclined as error:
                raise ConsumeLater from error

        async with consumer:
            (letter,) = await dead_letters(address, 1)
    told = letter.properties
    assert (letter.body, letter.tags, letter.keys, told["a"]) == (b"17", "paid", ["k"], "b")
    assert letter.msg_id == sent.msg_id
    assert (letter.born_timestamp, told["__BORNHOST"]) == first[0]
    assert (told["rmqkit_tries"], told["rmqkit_handler"]) == ("1", handler_name(bill))
    assert handler_name(bill).startswith(f"{__name__}.test_a_dead_letter")
    if way in ("raises", "later from"):
        assert told["rmqkit_reason"] == "CardDeclined: card of order 17 declined"
        lines = told["rmqkit_traceback"].split("\n")
        assert lines[0] == "Traceback (most recent call last):"
        assert lines[1].endswith(", in bill")
        assert lines[-1] == "declined"
        assert any(line.endswith(", in charge") for line in lines)
    else:
        assert "rmqkit_traceback" not in told
        gave_up = "its handler gave it up without a reason"
        assert told["rmqkit_reason"] == ("no such customer" if way == "gives up" else gave_up)


@pytest.mark.parametrize("kind", ["push", "pop"])
async def test_a_handler_in_a_thread_is_named_too(kind, tmp_path):
    async with running(tmp_path) as (address, producer):
        await producer.send("Orders", b"17")
        consumer = KINDS[kind](address)
        consumer.subscribe("Orders", "*", refuse)
        async with consumer:
            (letter,) = await dead_letters(address, 1)
    assert letter.properties["rmqkit_handler"] == f"{__name__}.refuse"
    assert letter.properties["rmqkit_reason"] == "ValueError: never"
    assert letter.properties["rmqkit_traceback"].split("\n")[-1] == "ValueError: never"


def refuse(message: ReceivedMessage) -> None:
    raise ValueError("never")


async def test_a_message_that_is_tried_again_has_no_reason_yet(tmp_path):
    settings = PushConsumerSettings(take_over_pause_ms=0, start_from=StartFrom.FIRST_OFFSET, retries_max=1)
    async with running(tmp_path) as (address, producer):
        await producer.send("Orders", b"17")
        consumer, tries = PushConsumer("CG", address, settings=settings), []

        @consumer.on("Orders")
        async def bill(message: ReceivedMessage) -> None:
            tries.append({name for name in message.properties if name.startswith("rmqkit_")})
            raise ConsumeLater(delay=1) if len(tries) == 1 else ValueError("never")

        async with consumer:
            (letter,) = await dead_letters(address, 1)
    assert tries == [set(), set()]
    assert letter.properties["rmqkit_tries"] == "2"


def test_a_reason_is_bounded_and_has_no_separators():
    deep = RecursionError("x\x01y\x02\n" + "z" * 3000)
    reason = Reason(text_of(deep), "first\n" + "l\x02ine\n" * 2000 + "last", "h" * 999, 17)
    told = reason.properties()
    assert list(told) == ["rmqkit_reason", "rmqkit_tries", "rmqkit_handler", "rmqkit_traceback"]
    assert told["rmqkit_reason"].startswith("RecursionError: x y  z")
    assert [len(told["rmqkit_reason"]), len(told["rmqkit_handler"]), told["rmqkit_tries"]] == [1000, 200, "17"]
    lines = told["rmqkit_traceback"].split("\n")
    assert (lines[0], lines[1], lines[-1]) == ("…", "l ine", "last")
    assert 3900 < len(told["rmqkit_traceback"]) <= 4002


def test_a_deep_traceback_ends_where_it_was_raised():
    def dive(left: int) -> None:
        if left == 0:
            raise ValueError("bottom")
        dive(left - 1)

    with pytest.raises(ValueError, match="bottom") as caught:
        dive(200)
    lines = traceback_of(caught.value).split("\n")
    assert lines[-1] == "ValueError: bottom"
    assert len(lines) < 70


class Bills:
    def __call__(self, message: ReceivedMessage) -> None: ...

    def take(self, message: ReceivedMessage) -> None: ...


def test_handlers_of_every_kind_have_a_name():
    assert handler_name(refuse) == f"{__name__}.refuse"
    assert handler_name(functools.partial(refuse)) == f"{__name__}.refuse"
    assert handler_name(Bills()) == f"{__name__}.Bills"
    assert handler_name(Bills().take) == f"{__name__}.Bills.take"
    assert handler_name([].append) == "list.append"


@pytest.mark.parametrize(
    ("free", "kept"),
    [
        (32_000, ["rmqkit_reason", "rmqkit_tries", "rmqkit_handler", "rmqkit_traceback"]),
        (2000, ["rmqkit_reason", "rmqkit_tries", "rmqkit_handler"]),
        (1200, ["rmqkit_reason", "rmqkit_tries"]),
        (1020, []),
    ],
)
def test_the_least_important_goes_first_where_room_is_short(free, kept):
    own = {"own": "x" * (32_767 - 512 - free)}
    message = received(0, properties=own)
    reason = Reason("r" * 1000, "t" * 4000, "h" * 200, 17).properties()
    if not kept:
        with pytest.raises(ValueError, match="no space for a reason"):
            encode_dead_letter(message, "CG", reason)
        return
    prepared = encode_dead_letter(message, "CG", reason)
    assert [name for name in decode_properties(prepared.properties.encode()) if name.startswith("rmqkit")] == kept

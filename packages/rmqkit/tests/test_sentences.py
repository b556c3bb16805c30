"""Sentences: text in English, with what a translation needs."""

from __future__ import annotations

import copy
import pickle
from datetime import UTC, datetime

import msgspec
import pytest

from rmqkit.sentences import Sentence, _, capital, joined, marked, plain


def test_a_sentence_is_its_english_text() -> None:
    found = _("topic {topic} has {count:,} messages", topic="T", count=1234)
    assert found == "topic T has 1,234 messages"
    assert isinstance(found, Sentence)
    assert (found.template, found.values) == ("topic {topic} has {count:,} messages", {"topic": "T", "count": 1234})


def test_braces_without_values_stay() -> None:
    assert _("send {} as a body") == "send {} as a body"


def test_the_text_of_an_error_is_the_sentence_it_was_raised_with() -> None:
    found = _("queue {queue} ends", queue=1)
    assert str(ValueError(found)) is found
    outer = _("broker {broker}: {error}", broker="b", error=ValueError(found))
    assert isinstance(outer, Sentence)
    assert outer.values["error"] is found


def test_a_value_that_is_neither_text_nor_number_becomes_text() -> None:
    found = _("since {at}, of {what}", at=datetime(2026, 1, 2, tzinfo=UTC), what=None)
    assert isinstance(found, Sentence)
    assert found.values == {"at": "2026-01-02 00:00:00+00:00", "what": "None"}


def test_copies_and_encodings_are_plain_text() -> None:
    found = _("{a}", a="x")
    assert type(pickle.loads(pickle.dumps(found))) is str
    assert type(copy.deepcopy([found])[0]) is str
    assert type(plain(found)) is type(plain("x")) is str
    assert msgspec.json.encode([found], enc_hook=plain) == b'["x"]'


@pytest.mark.parametrize("mark", [", ", "; "])
def test_parts_are_joined_to_a_sentence_if_one_is_a_sentence(mark: str) -> None:
    parts = ["a", _("{b}", b="b"), "c"]
    found = joined(mark, parts)
    assert found == mark.join(parts)
    assert isinstance(found, Sentence)
    assert type(joined(mark, ["a", "b"])) is str
    assert joined(mark, []) == ""


def test_a_capital_letter_keeps_the_sentence() -> None:
    found = capital(_("its {what}", what="offset"))
    assert found == "Its offset"
    assert isinstance(found, Sentence)
    assert found.template == "its {what}"
    assert capital("none") == "None"
    assert not isinstance(capital("none"), Sentence)


def test_a_marked_text_stays_a_plain_text() -> None:
    assert type(marked("paused")) is str

"""Trace records (remoting.md §7.7)."""

from __future__ import annotations

import typing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmqkit.errors import BodyError
from rmqkit.protocol.trace import (
    EndTransactionTrace,
    PublishTrace,
    RecallTrace,
    SubscribeAfterTrace,
    SubscribeBeforeTrace,
    Trace,
    TracedType,
    decode_traces,
    encode_traces,
)
from tests.struct_values import structs

EXAMPLES = [
    (
        "Pub|17|r|g|T|id|A|k1 k2|1.1.1.1:10911|5|3|1|offset-id|true|1.1.1.1",
        PublishTrace(
            17, "r", "g", "T", "id", "A", "k1 k2", "1.1.1.1:10911", 5, 3, TracedType.HALF, "offset-id", True, "1.1.1.1"
        ),
    ),
    (
        "Pub|17|r|g|T|id|null|null|h|5|3|0|null|false",
        PublishTrace(17, "r", "g", "T", "id", None, None, "h", 5, 3, 0, None, False),
    ),
    ("SubBefore|17|null|g|rid|id|2|k", SubscribeBeforeTrace(17, None, "g", "rid", "id", 2, "k")),
    ("SubAfter|rid|id|3|true|k|0", SubscribeAfterTrace("rid", "id", 3, True, "k", 0)),
    ("SubAfter|rid|id|3|true|k|4|17|g", SubscribeAfterTrace("rid", "id", 3, True, "k", 4, 17, "g")),
    (
        "EndTransaction|17|r|g|T|id|A|k|h|2|tid|COMMIT_MESSAGE|true",
        EndTransactionTrace(17, "r", "g", "T", "id", "A", "k", "h", 2, "tid", "COMMIT_MESSAGE", True),
    ),
    ("Recall|17|r|g|T|id|true", RecallTrace(17, "r", "g", "T", "id", True)),
]


def wire(*lines: str) -> bytes:
    return "".join(line.replace("|", "\x01") + "\x02" for line in lines).encode()


@pytest.mark.parametrize(("line", "trace"), EXAMPLES)
def test_each_kind_is_read_and_written(line, trace):
    assert encode_traces([trace]) == wire(line)
    assert decode_traces(wire(line)) == [trace]


def test_records_stand_one_behind_the_other():
    lines, traces = zip(*EXAMPLES, strict=True)
    assert encode_traces(traces) == wire(*lines)
    assert decode_traces(wire(*lines)) == list(traces)
    assert decode_traces(b"") == []


def test_fields_of_newer_clients_are_ignored():
    assert decode_traces(wire("Recall|17|r|g|T|id|true|new")) == [RecallTrace(17, "r", "g", "T", "id", True)]


@pytest.mark.parametrize("line", ["What|1", "Recall", "Recall|x|r|g|T|id|true", "Recall|1|r|g|T|id|maybe", "Pub|1|r"])
def test_what_is_no_record_is_a_body_error(line):
    with pytest.raises(BodyError, match=line.partition("|")[0]):
        decode_traces(wire(line))


def test_separators_cannot_be_written():
    with pytest.raises(ValueError, match="separator"):
        encode_traces([RecallTrace(17, "r\x01", "g", "T", "id", True)])


@given(st.binary(max_size=60) | st.text("PubRecall|0123\x01\x02true", max_size=60).map(str.encode))
def test_any_bytes_are_traces_or_a_body_error(noise):
    for body in (noise, wire(EXAMPLES[0][0]) + noise, wire(EXAMPLES[-1][0])[:-4] + noise):
        try:
            decode_traces(body)
        except BodyError as error:
            assert str(error)


TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\x01\x02"), max_size=9).filter(lambda t: t != "null")


@pytest.mark.parametrize("kind", typing.get_args(Trace))
def test_every_kind_survives(kind):
    texts = {name: TEXT for name, hint in typing.get_type_hints(kind).items() if hint == str | None}

    @given(structs(kind, **texts))
    def survives(trace):
        assert decode_traces(encode_traces([trace])) == [trace]

    survives()

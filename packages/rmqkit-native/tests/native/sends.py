"""Sends as clients write them, and odd ones."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from rmqkit.protocol.command import JSON, encode_command, request
from rmqkit.protocol.schemas.send import SendMessageV2Request
from tests.native.equal import NOT_PLAIN, STAMPS, TIMED


def send(
    fields: dict[str, str] | None = None, *, code: int = 310, body: bytes = b"hello", kind: int = JSON, opaque: int = 7
) -> bytes:
    header = SendMessageV2Request(
        "p", "Orders", "TBW102", 4, 1, 0, 1_700_000_000_000, 0, "UNIQ_KEY\x01A1\x02", 0, False
    )
    command = request(code, header, body)
    assert isinstance(command.fields, dict), "it was just made"
    command.fields |= fields or {}
    command.opaque = opaque
    return b"".join(bytes(piece) for piece in encode_command(command, kind))


def batch(body: bytes, fields: dict[str, str] | None = None, **more: Any) -> bytes:
    """A frame of a batch."""
    return send({"m": "true", **(fields or {})}, code=320, body=body, **more)


def string(pairs: list[tuple[str, str]]) -> str:
    return "".join(f"{name}\x01{value}\x02" for name, value in [*pairs, ("UNIQ_KEY", "7F00AB")])


PLAIN_NAMES = [
    "__LITE_TOPIC",
    "KEYS",
    "TAGS",
    "WAIT",
    "a",
    "größe",
    "\U0001f600",
    "x" * 40,
    "INSTANCE_ID",
    "Aa",
    "BB",
    "1",
    "2",
    "3",
]
names = st.sampled_from([*PLAIN_NAMES, "__CRC32#", *NOT_PLAIN, *STAMPS, *TIMED, ""])
values = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x01\x02"), max_size=12)
plain_values = values.filter(bool)
lite_topics = st.sampled_from(["s1", "s2", "s-3", "S_4", "n" * 64])
plain_strings = st.tuples(
    st.dictionaries(st.sampled_from(PLAIN_NAMES), plain_values, max_size=8), st.none() | lite_topics
).map(lambda both: string(list((both[0] | ({"__LITE_TOPIC": both[1]} if both[1] else {})).items())))
times = st.tuples(st.sampled_from([*TIMED]), st.integers(0, 10**17 - 1).map(str))
timed_strings = st.tuples(st.lists(times, min_size=1, max_size=3, unique_by=lambda one: one[0]), plain_strings).map(
    lambda both: string(both[0])[: -len("UNIQ_KEY\x017F00AB\x02")] + both[1]
)
odd_strings = st.lists(st.tuples(names, values), max_size=14).map(string)
strings = plain_strings | odd_strings
odd = st.sampled_from(["", "0", "00", "-1", "+1", " 1", "1.0", "true", "false", "99999999999", "9" * 25, "x", "\x00"])
changes = st.dictionaries(st.sampled_from("abcdefghijklmnopX"), odd | values, max_size=3)

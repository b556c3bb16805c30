"""Request signatures (remoting.md §3.3, vectors of §12)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmqkit.protocol.acl import SIGNATURE, sign, verify

VECTORS = [
    ({"topic": "T", "AccessKey": "ak"}, b"", "nd9T7YPZHofi0bGc7HK96Fbl1Aw="),
    ({"a": "1", "b": "2", "AccessKey": "ak"}, b"body", "Wok/kFJVvyxP4UBBvxo1tBt49/s="),
]
SECRET = "sk12345"


@pytest.mark.parametrize(("fields", "body", "signature"), VECTORS)
def test_the_vectors_are_signed_and_verified(fields, body, signature):
    assert sign(fields, body, SECRET) == signature
    assert sign({**fields, SIGNATURE: "of an earlier try"}, body, SECRET) == signature
    assert verify({**fields, SIGNATURE: signature}, body, SECRET)


def test_a_body_in_pieces_is_signed_as_one():
    assert sign({}, [b"bo", memoryview(b"dy")], SECRET) == sign({}, b"body", SECRET)


def test_names_are_ordered_by_utf_16_units():
    # U+FF01 is one unit, 0xFF01; U+1F600 begins with the unit 0xD83D and so comes first in Java.
    assert sign({"\uff01": "2", "\U0001f600": "1"}, b"", SECRET) == sign({"x": "12"}, b"", SECRET)


FIELDS, BODY, SIGNED = VECTORS[1]


@pytest.mark.parametrize(
    ("fields", "body", "secret"),
    [
        (FIELDS, b"bodx", SECRET),
        (FIELDS, BODY, "sk12346"),
        ({**FIELDS, "a": "2"}, BODY, SECRET),
        ({**FIELDS, "added": "x"}, BODY, SECRET),
        ({"a": "1"}, BODY, SECRET),
    ],
)
def test_whatever_changes_breaks_the_signature(fields, body, secret):
    assert not verify({**fields, SIGNATURE: SIGNED}, body, secret)


def test_a_request_without_signature_is_not_signed():
    assert not verify(FIELDS, BODY, SECRET)


TEXT = st.text(st.characters(), max_size=10)


@given(st.dictionaries(TEXT, TEXT, max_size=5), st.binary(max_size=20), st.text(st.characters(codec="utf-8")))
def test_any_fields_can_be_signed_and_verified(fields, body, secret):
    assert verify({**fields, SIGNATURE: sign(fields, body, secret)}, body, secret)
    assert isinstance(verify(fields, body, secret), bool)

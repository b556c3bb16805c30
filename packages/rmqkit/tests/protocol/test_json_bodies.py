"""Values that are sent as JSON, and read back as values of their type."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmqkit.errors import BodyMismatch
from rmqkit.protocol.bodies import decoder_of, encode_body
from tests.client.messages import received

pydantic = pytest.importorskip("pydantic")


class Struct(msgspec.Struct):
    id: int
    note: str = ""


@dataclasses.dataclass
class Plain:
    id: int
    note: str = ""


class Model(pydantic.BaseModel):
    id: int
    note: str = pydantic.Field(default="", alias="theNote", max_length=20)


@pydantic.dataclasses.dataclass
class Checked:
    id: int
    note: str = pydantic.Field(default="", max_length=20)


@pytest.mark.parametrize(
    ("value", "body"),
    [
        (Struct(17, "rush"), b'{"id":17,"note":"rush"}'),
        (Plain(17, "rush"), b'{"id":17,"note":"rush"}'),
        (Model(id=17, theNote="rush"), b'{"id":17,"theNote":"rush"}'),
        (Checked(17, "rush"), b'{"id":17,"note":"rush"}'),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_is_sent_as_json_and_read_back(value, body):
    assert encode_body(value) == body
    assert decoder_of(type(value))(body) == value
    assert received(0, body).body_as(type(value)) == value


@given(st.integers(-(2**63), 2**64 - 1), st.text())
def test_what_is_written_is_read(number, text):
    assert decoder_of(Struct)(encode_body(Struct(number, text))) == Struct(number, text)


@pytest.mark.parametrize(
    ("kind", "body", "value"),
    [
        (list[Struct], b'[{"id":1}]', [Struct(1)]),
        (list[Model], b'[{"id":1}]', [Model(id=1)]),
        (dict[str, int], b'{"a":1}', {"a": 1}),
        (int, b"17", 17),
    ],
    ids=str,
)
def test_types_of_libraries_may_be_parts_of_others(kind, body, value):
    assert decoder_of(kind)(body) == value


@pytest.mark.parametrize(
    ("kind", "body", "text"),
    [
        (Struct, b'{"id":"1"}', "the body is not of type Struct: Expected `int`, got `str` - at `$.id`"),
        (Struct, b"{}", "the body is not of type Struct: Object missing required field `id`"),
        (Struct, b"{]", "the body is not of type Struct: JSON is malformed: object keys must be strings (byte 1)"),
        (Struct, b"\xff", "the body is not of type Struct: JSON is malformed: invalid character (byte 0)"),
        (
            Model,
            b'{"id":"x","theNote":"secret secret secret secret"}',
            (
                "the body is not of type Model: id: Input should be a valid integer, unable to parse string as an "
                "integer; theNote: String should have at most 20 characters"
            ),
        ),
        (Model, b"not JSON", "the body is not of type Model: Invalid JSON: expected ident at line 1 column 2"),
        (Checked, b"{}", "the body is not of type Checked: id: Field required"),
        (list[Model], b"[{}]", f"the body is not of type list[{__name__}.Model]: 0.id: Field required"),
    ],
)
def test_a_body_that_does_not_fit_says_why_in_one_line(kind, body, text):
    with pytest.raises(BodyMismatch) as caught:
        decoder_of(kind)(body)
    assert str(caught.value) == text


def test_a_model_with_many_faults_names_five():
    wide = pydantic.create_model("Wide", **{f"f{i}": (int, ...) for i in range(8)})
    with pytest.raises(BodyMismatch) as caught:
        decoder_of(wide)(b"{}")
    assert caught.value.reason.endswith("f4: Field required; and 3 more")


def test_a_body_that_is_nested_without_end_does_not_fit():
    with pytest.raises(BodyMismatch):
        decoder_of(list)(b"[" * 100_000)


@pytest.mark.parametrize("value", ["text", 17, None, {"id": 1}, [1]], ids=repr)
def test_other_values_are_no_bodies(value):
    with pytest.raises(ValueError, match="it must be bytes, a msgspec Struct, a dataclass or a pydantic model"):
        encode_body(value)


def test_what_has_no_json_is_refused():
    class Odd(msgspec.Struct):
        handle: object

    with pytest.raises(ValueError, match="a Odd that cannot be written as JSON"):
        encode_body(Odd(object()))


def test_pydantic_is_not_loaded_for_other_types():
    code = (
        "import sys, msgspec\n"
        "from rmqkit.protocol.bodies import decoder_of, encode_body\n"
        "Order = msgspec.defstruct('Order', [('id', int)])\n"
        "assert decoder_of(Order)(encode_body(Order(1))) == Order(1)\n"
        "print('pydantic' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=200)
    assert done.stdout.strip() == "False"

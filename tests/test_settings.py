"""Settings from properties files."""

from __future__ import annotations

import enum
from typing import Annotated

import pytest
from msgspec import Struct

from rmqkit.errors import SettingsError
from rmqkit.settings import Setting, load, parse_properties, read_properties, to_properties


class Mode(enum.Enum):
    FAST = "FAST"
    SAFE = "SAFE"


class Example(Struct):
    listen_port: Annotated[int, Setting("listenPort", "port", low=0, high=65535)] = 1
    name: Annotated[str, Setting("brokerName", "name")] = "b"
    mode: Annotated[Mode, Setting("mode", "how")] = Mode.FAST
    on: Annotated[bool, Setting("enableIt", "whether")] = False


class Other(Struct):
    port_too: Annotated[int, Setting("listenPort", "the same key", low=0)] = 2


def loaded(text: str, **more):
    return load([Example, Other], parse_properties(text), source="broker.conf", **more)


def test_one_file_fills_several_settings():
    example, other = loaded("listenPort=9\nbrokerName = broker-a\nmode=SAFE\nenableIt=True").values
    assert (example, other) == (Example(9, "broker-a", Mode.SAFE, True), Other(9))


def test_defaults_stay_where_the_file_is_silent():
    assert loaded("").values == (Example(), Other())


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("listenPort=abc", "broker.conf: listenPort=abc must be a whole number from 0 to 65535"),
        ("listenPort=70000", "broker.conf: listenPort=70000 must be a whole number from 0 to 65535"),
        ("enableIt=yes", "broker.conf: enableIt=yes must be true or false"),
        ("mode=SLOW", "broker.conf: mode=SLOW must be one of FAST, SAFE"),
    ],
)
def test_a_wrong_value_is_one_line_with_key_value_and_remedy(line, text):
    with pytest.raises(SettingsError) as caught:
        loaded(line)
    assert str(caught.value) == text


def test_an_unknown_key_comes_with_the_nearest_known_one():
    result = loaded("listenport=1\nqqqqqqqq=2\nsendThreads=3", without_effect=["sendThreads"])
    assert result.unknown == [("listenport", "listenPort"), ("qqqqqqqq", None)]
    assert result.without_effect == ["sendThreads"]


def test_settings_are_printed_as_they_are_read():
    text = to_properties(Example(5, "x", Mode.SAFE, True))
    assert text == {"listenPort": "5", "brokerName": "x", "mode": "SAFE", "enableIt": "true"}
    assert load([Example], text, source="s").values == (Example(5, "x", Mode.SAFE, True),)


def test_the_java_properties_format():
    text = "# comment\n! comment\n\n a = 1 \nb:2\nc 3\nd=x\\\n   y\ne=\\u0041\\t\\=\\\\\nf\ng\\ h=i\nj=k=l"
    assert parse_properties(text) == {
        "a": "1",
        "b": "2",
        "c": "3",
        "d": "xy",
        "e": "A\t=\\",
        "f": "",
        "g h": "i",
        "j": "k=l",
    }


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(SettingsError, match=r"cannot read configuration .*none\.conf: No such file"):
        read_properties(tmp_path / "none.conf")
    (tmp_path / "binary.conf").write_bytes(b"\xff\xfe")
    with pytest.raises(SettingsError, match="not UTF-8"):
        read_properties(tmp_path / "binary.conf")

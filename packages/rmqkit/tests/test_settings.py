"""Settings from properties files."""

from __future__ import annotations

import enum
from typing import Annotated

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct

from rmqkit.errors import SettingsError
from rmqkit.settings import (
    Configuration,
    Given,
    Setting,
    given_by_file,
    load,
    parse_properties,
    properties_line,
    read_properties,
    to_properties,
    write_properties,
)


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


# -- files that are changed, and settings that change while something runs


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", "listenPort=5\nbrokerName=x=y\n"),
        ("# mine\nlistenPort : 7 \n\n! end", "# mine\nlistenPort=5\n\n! end\nbrokerName=x=y\n"),
        ("brokerName=a\\\n  b\nmode=SAFE\n", "brokerName=x=y\nmode=SAFE\nlistenPort=5\n"),
        ("listenPort=1\r\nlistenPort=2\r\n", "listenPort=1\r\nlistenPort=5\nbrokerName=x=y\n"),
    ],
)
def test_a_file_keeps_what_was_not_changed(tmp_path, before, after):
    file = tmp_path / "conf" / "broker.conf"
    if before:
        file.parent.mkdir()
        file.write_bytes(before.encode())
        file.chmod(0o640)
    write_properties(file, {"listenPort": "5", "brokerName": "x=y"})
    assert file.read_bytes().decode() == after
    assert {"listenPort": "5", "brokerName": "x=y"}.items() <= read_properties(file).items()
    assert not before or file.stat().st_mode & 0o777 == 0o640
    assert [path.name for path in file.parent.iterdir()] == ["broker.conf"]


@given(st.dictionaries(st.sampled_from("abc"), st.text(st.characters(blacklist_categories=["Cs"])), max_size=3))
def test_what_is_written_is_read_but_for_blanks_at_the_end(properties):
    lines = "".join(properties_line(key, value) + "\n" for key, value in properties.items())
    assert parse_properties(lines) == {key: value.rstrip() for key, value in properties.items()}


def test_who_gave_a_value_is_in_its_error(tmp_path):
    file = tmp_path / "broker.conf"
    file.write_text("brokerName=\\\n  b\n\nlistenPort=x\n")
    found = given_by_file(file)
    assert found["brokerName"] == Given("b", f"{file}:1")
    with pytest.raises(SettingsError, match=f"{file}:4: listenPort=x must be"):
        Configuration.load([Example], found)


class Live(Struct):
    port: Annotated[int, Setting("listenPort", "port", low=0)] = 1
    size: Annotated[int, Setting("size", "bytes", low=1, hot=True)] = 10
    word: Annotated[str, Setting("word", "secret", hot=True, secret=True)] = ""


def test_a_reload_changes_what_is_hot_and_names_the_rest():
    configuration = Configuration.load([Live], {"size": Given("20", "f:1")})
    (live,) = configuration.settings
    told: list[list[str]] = []
    configuration.listeners.append(told.append)
    live.port = 7  # a server fills in what it found: no difference to the file
    assert configuration.reload({"size": Given("20", "f:1")}) == ([], [])
    assert configuration.reload({"size": Given("30", "f:1"), "listenPort": Given("2", "f:2")}) == (
        ["size"],
        ["listenPort"],
    )
    assert (live.size, live.port) == (30, 7)
    assert configuration.reload({}) == (["size"], [])
    assert live.size == 10
    with pytest.raises(SettingsError):
        configuration.reload({"word": Given("w", "f:1"), "size": Given("0", "f:2")})
    assert (live.word, told) == ("", [["size"], ["size"]])


def test_a_change_is_all_or_nothing_and_covers_secrets():
    configuration = Configuration([Live()])
    (live,) = configuration.settings
    assert configuration.is_frozen(["size", "listenPort"])
    assert not configuration.is_frozen(["size", "unknown"])
    with pytest.raises(SettingsError, match="request: size=0 must be a whole number at least 1"):
        configuration.change({"word": "w", "size": "0"})
    assert live == Live()
    configuration.change({"word": "w", "size": "3"})
    assert live == Live(1, 3, "w")
    assert configuration.texts() == {"listenPort": "1", "size": "3", "word": "***"}
    described = {row.key: (row.source, row.default, row.bounds) for row in configuration.described()}
    assert described["size"] == ("request", "10", "a whole number at least 1")
    assert described["listenPort"] == ("default", "1", "a whole number at least 0")


def test_a_proxys_json_is_read_like_properties(tmp_path):
    path = tmp_path / "rmq-proxy.json"
    lines = ["{", '"port": 8081,', '"on": true,', '"off": null,', r'"user": "{\"a\":1}",', '"own": {"b": [2]}', "}"]
    path.write_text("\n".join(lines))
    assert given_by_file(path) == {
        "port": Given("8081", f"{path}:2"),
        "on": Given("true", f"{path}:3"),
        "user": Given('{"a":1}', f"{path}:5"),
        "own": Given('{"b":[2]}', f"{path}:6"),
    }
    path.write_text("")
    assert given_by_file(path) == {}


@pytest.mark.parametrize("text", ["[]", "port=1", '{"port": 1'])
def test_json_that_is_no_object_of_settings_is_named(tmp_path, text):
    path = tmp_path / "rmq-proxy.json"
    path.write_text(text)
    with pytest.raises(SettingsError, match=r"rmq-proxy.json has to be one JSON object of settings: "):
        given_by_file(path)


def test_changes_are_not_written_to_json(tmp_path):
    with pytest.raises(SettingsError, match="changes are kept in properties files only"):
        write_properties(tmp_path / "rmq-proxy.json", {"a": "1"})

"""Profiles of clusters: how they are kept, and which of flag, environment, profile and default holds."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
import typer

from rmqkit.cli import app
from rmqkit.cli.frame import nouns
from rmqkit.cli.frame.profiles import file_path, read
from rmqkit.errors import ExitCode
from tests.cli.in_process import rmq
from tests.client.peers import standalone


@pytest.fixture(scope="module")
def namesrv(tmp_path_factory):
    with standalone(tmp_path_factory.mktemp("profiles")) as address:
        assert rmq("send", "Orders", "17", "-n", address).returncode == 0
        yield address


@pytest.fixture(autouse=True)
def of_a_person(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    for name in ("RMQ_PROFILE", "NAMESRV_ADDR", "RMQ_ACCESS_KEY", "RMQ_SECRET_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def asked(monkeypatch):
    """The common options that the next command gets."""

    def ask(*arguments: str) -> dict:
        got = {}
        monkeypatch.setattr(nouns, "_run", lambda operation, given, options: got.update(options))
        done = rmq("cluster", "list", *arguments)
        assert done.returncode == 0, done.stderr
        return got

    return ask


def add(name: str, *options: str, servers: str = "ns:9876") -> None:
    done = rmq("profile", "add", name, "-n", servers, *options)
    assert done.returncode == 0, done.stderr


def told(*arguments: str) -> str:
    """The error of a command line that is not valid."""
    done = rmq(*arguments)
    assert (done.returncode, done.stdout) == (ExitCode.USAGE, "")
    return done.stderr


def test_a_profile_is_kept_shown_and_removed():
    assert (
        rmq("profile", "list").stdout
        == "no profiles; add one with: rmq profile add local --name-servers 127.0.0.1:9876\n"
    )
    assert rmq("profile", "list", "--json").stdout == "[]\n"
    add("test", servers="127.0.0.1:9876")
    add("prod", "--tls", "--access-key", "ada", "--secret-key", "s3cret", "--timeout", "9000", "--use")
    assert rmq("profile", "list").stdout.splitlines() == [
        "NAME  NAME SERVERS    USER  TLS  CURRENT",
        "prod  ns:9876         ada   yes  yes",
        "test  127.0.0.1:9876        no   no",
    ]
    shown = {"name": "prod", "nameServers": "ns:9876", "timeoutMs": 9000, "accessKey": "ada", "secretKey": "***"}
    assert json.loads(rmq("profile", "show", "--json").stdout) == {**shown, "tls": True}
    assert "s3cret" not in rmq("profile", "show", "prod").stdout
    assert rmq("profile", "remove", "prod").stdout == "removed prod\n"
    assert (list(read().profiles), read().current) == (["test"], "")


def test_the_order_is_flag_environment_profile_default(asked, monkeypatch):
    assert asked()["name_servers"] == "127.0.0.1:9876"
    add("one", "--timeout", "7000", servers="one:1")
    add("two", servers="two:2")
    rmq("profile", "use", "one")
    assert (asked()["name_servers"], asked()["timeout_ms"]) == ("one:1", 7000)
    assert asked("--timeout", "8000")["timeout_ms"] == 8000
    monkeypatch.setenv("RMQ_PROFILE", "two")
    assert (asked()["name_servers"], asked()["timeout_ms"]) == ("two:2", 5000)
    monkeypatch.setenv("NAMESRV_ADDR", "environment:3")
    assert asked()["name_servers"] == "environment:3"
    assert asked("--profile", "one")["name_servers"] == "one:1", "what was typed goes before the environment"
    assert asked("--profile", "one", "-n", "flag:4")["name_servers"] == "flag:4"
    monkeypatch.delenv("NAMESRV_ADDR")
    assert asked("--profile", "")["name_servers"] == "127.0.0.1:9876"
    monkeypatch.delenv("RMQ_PROFILE")
    rmq("profile", "use", "--none")
    assert asked()["name_servers"] == "127.0.0.1:9876"


@pytest.mark.parametrize("command", ["send", "tail", "consume", "replay", "top", "explain", "console", "topic list"])
def test_every_command_that_asks_name_servers_takes_a_profile(command):
    error = told(
        *command.split(),
        *(["x", "--group", "G"] if command == "consume" else ["x"][: command in "send tail explain"]),
        "--profile",
        "prdo",
    )
    assert "there is no profile 'prdo'" in error


def test_a_command_uses_the_cluster_and_the_user_of_a_profile(namesrv, asked, tmp_path, monkeypatch):
    add("here", servers=namesrv)
    assert json.loads(rmq("tail", "Orders", "--from", "beginning", "--count", 1, "--json", "--profile", "here").stdout)
    (tmp_path / "key").write_text("of a file\n")
    add("filed", "--access-key", "ada", "--secret-key-file", str(tmp_path / "key"), "--tls-ca", "ca.pem")
    add("set", "--access-key", "ada", "--secret-key-env", "PROD_SECRET")
    options = asked("--profile", "filed")
    assert (options["access_key"], options["secret_key"]) == ("ada", "of a file")
    assert options["tls_ca"] == str(Path("ca.pem").absolute()), "commands run in any folder"
    monkeypatch.setenv("PROD_SECRET", "of the environment")
    assert asked("--profile", "set")["secret_key"] == "of the environment"


def test_a_secret_key_may_be_typed(monkeypatch, asked):
    with monkeypatch.context() as patch:
        patch.setattr("getpass.getpass", lambda question: "typed" if "ada" in question else "")
        patch.setattr("rmqkit.cli.profile._is_terminal", lambda: True)
        add("prod", "--access-key", "ada", "--secret-key", "-")
    assert asked("--profile", "prod")["secret_key"] == "typed"


def test_the_file_is_for_its_owner_alone():
    add("prod", "--access-key", "ada", "--secret-key", "s3cret")
    path = file_path()
    assert [stat.S_IMODE(one.stat().st_mode) for one in (path, path.parent)] == [0o600, 0o700]
    path.chmod(0o644)
    assert told("profile", "list") == (
        f"rmq: {path} holds the secret key of prod and other users can read it (mode 644): chmod 600 {path}\n"
    )
    path.chmod(0o600)
    assert rmq("profile", "add", "prod", "-n", "ns:9876", "--replace").returncode == 0
    path.chmod(0o644)
    assert rmq("profile", "list").returncode == 0, "there is no secret in it now"


def test_a_file_of_a_person_who_links_it_stays_where_it_is(tmp_path):
    own = tmp_path / "dotfiles.json"
    own.write_text("{}")
    file_path().parent.mkdir()
    file_path().symlink_to(own)
    add("prod")
    assert file_path().is_symlink()
    assert "prod" in json.loads(own.read_text())["profiles"]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("{", "is not a file of profiles: Input data was truncated"),
        ('{"profile": {}}', "is not a file of profiles: Object contains unknown field `profile`"),
        ('{"profiles": {"a": {}}}', "is not a file of profiles: Object missing required field `nameServers`"),
        ('{"profiles": {"a": {"nameServers": "x"}}}', "address 'x' must be host:port, for example 127.0.0.1:9876"),
    ],
)
def test_a_file_that_is_none_is_reported_by_its_name(text, error):
    file_path().parent.mkdir()
    file_path().write_text(text)
    assert f"{file_path()} is not a file of profiles" in told("cluster", "list")
    assert error in told("profile", "list")


ERRORS = {
    "a bad name": (["add", "a/b", "-n", "ns:1"], "profile name 'a/b' must be 1 to 64 letters, digits, - _ and ."),
    "a bad address": (
        ["add", "a", "-n", "ns"],
        "profile a: address 'ns' must be host:port, for example 127.0.0.1:9876",
    ),
    "a name that is there": (["add", "prod", "-n", "ns:1"], "profile prod exists already: --replace replaces it"),
    "two keys": (
        ["add", "a", "-n", "ns:1", "--access-key", "k", "--secret-key", "s", "--secret-key-env", "S"],
        "profile a: the secret key is given 2 times: secret_key, secret_key_env",
    ),
    "a key of nobody": (
        ["add", "a", "-n", "ns:1", "--secret-key", "s"],
        "profile a: there is a secret key and no access key",
    ),
    "a name nobody has": (["use", "prdo"], "did you mean prod? it has prod"),
    "nothing to use": (["use"], "give NAME, or --none"),
    "nothing to show": (["show"], "no profile is current: name one, or choose one with: rmq profile use"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_what_is_wrong_is_reported_and_nothing_is_changed(case):
    add("prod")
    before = file_path().read_bytes()
    arguments, error = ERRORS[case]
    assert error in told("profile", *arguments)
    assert file_path().read_bytes() == before


def test_a_secret_that_cannot_be_had_is_reported(tmp_path):
    add("set", "--access-key", "ada", "--secret-key-env", "PROD_SECRET")
    add("filed", "--access-key", "ada", "--secret-key-file", str(tmp_path / "none"))
    place = "environment variable PROD_SECRET, which is not set"
    assert told("cluster", "list", "--profile", "set") == f"rmq: profile set has its secret key in {place}\n"
    assert "which cannot be read: No such file or directory" in told("top", "--once", "--profile", "filed")
    error = json.loads(told("cluster", "list", "--profile", "nobody", "--json"))
    assert (error["kind"], error["exitCode"]) == ("SettingsError", ExitCode.USAGE)


def test_names_are_completed_and_live_names_come_from_the_profile(namesrv):
    add("here", servers=namesrv)
    assert nouns.PROFILE_NAMES("h") == ["here"]
    command = typer.main.get_command(app)
    context = command.make_context("rmq", ["send", "--profile", "here"], resilient_parsing=True)
    send = command.get_command(context, "send")
    below = send.make_context("send", ["--profile", "here"], parent=context, resilient_parsing=True)
    assert nouns.LIVE_TOPICS(below, "Or") == ["Orders"]
    file_path().write_text("{")
    assert nouns.PROFILE_NAMES("") == []

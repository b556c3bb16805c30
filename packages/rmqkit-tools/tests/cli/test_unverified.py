"""TLS without a CA verifies nothing: commands and programs say so, once, and how to verify."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from rmqkit.cli.frame import nouns
from rmqkit.remoting import tls
from rmqkit.remoting.tls import ClientTls, Tls
from tests.certificates import OPENSSL, REASON, make_certificate
from tests.cli.in_process import rmq

NOBODY = ("-n", "127.0.0.1:1")
WARNINGS = nouns._warn_unverified, tls._warn_unverified


@pytest.fixture(autouse=True)
def nothing_said() -> Iterator[None]:
    for one in WARNINGS:
        one.cache_clear()
    yield
    for one in WARNINGS:
        one.cache_clear()


@pytest.mark.parametrize("command", [("cluster", "list"), ("send", "T", "x"), ("tail", "T"), ("top", "--once")])
def test_a_command_says_once_that_nothing_is_verified(command: tuple[str, ...]) -> None:
    said = rmq(*command, *NOBODY, "--tls", "--timeout", "1000").stderr
    assert said.count("encrypts and verifies nothing") == 1, said
    assert "give --tls-ca FILE" in said


def test_a_script_gets_nothing_but_the_line_of_the_error() -> None:
    (line,) = rmq("cluster", "list", *NOBODY, "--tls", "--json").stderr.splitlines()
    assert json.loads(line)["exitCode"] == 3


def test_without_tls_nothing_is_said() -> None:
    assert "verifies" not in rmq("cluster", "list", *NOBODY).stderr


def test_a_completion_is_quiet(capfd: pytest.CaptureFixture[str]) -> None:
    context = SimpleNamespace(params={"name_servers": "127.0.0.1:1", "tls": True})
    assert nouns.LIVE_TOPICS(context, "") == []
    assert capfd.readouterr() == ("", "")


def test_a_program_is_notified_once_with_the_settings_that_verify(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        ClientTls(Tls(verify=False))
        ClientTls(Tls(verify=False))
    (line,) = caplog.messages
    assert "Tls(trusted=…)" in line


@pytest.mark.skipif(OPENSSL is None, reason=REASON)
def test_a_ca_is_verified_and_nothing_is_said(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    own = make_certificate(tmp_path, "server")
    said = rmq("cluster", "list", *NOBODY, "--tls-ca", own.certificate).stderr
    assert "verifies nothing" not in said
    ClientTls(Tls(trusted=str(own.certificate)))
    assert caplog.messages == []

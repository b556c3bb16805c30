"""Output and errors of `rmq explain`."""

from __future__ import annotations

import sys

import pytest

from rmqkit.__main__ import main
from rmqkit.admin.diagnosis.causes import Cause, Explanation, Fact
from rmqkit.cli.admin.message import page
from tests.cli.in_process import rmq

FOUND = Explanation(
    Cause.FILTERED_BY_TAG,
    "Message 7F0000010E is filtered: group billing subscribes to A || C, and its tag is B.",
    [
        Fact("stored in", "Orders, queue 3, offset 17, at 2026-11-21T20:29:25Z", "broker broker-a"),
        Fact("group's offset", 18, "broker broker-a"),
    ],
    "change the subscription",
)


def test_a_page_is_the_sentence_the_evidence_and_the_remedy():
    assert list(page(FOUND, 160)) == [
        "filtered by tag: Message 7F0000010E is filtered: group billing subscribes to A || C, and its tag is B.",
        "",
        "stored in       Orders, queue 3, offset 17, at 2026-11-21T20:29:25Z  broker broker-a",
        "group's offset  18                                                   broker broker-a",
        "",
        "Remedy: change the subscription",
    ]


def test_a_page_is_as_wide_as_the_terminal():
    assert list(page(FOUND, 60)) == [
        "filtered by tag: Message 7F0000010E is filtered: group",
        "billing subscribes to A || C, and its tag is B.",
        "",
        "stored in       Orders, queue 3, offset 17,  broker broker-a",
        "                at 2026-11-21T20:29:25Z",
        "group's offset  18                           broker broker-a",
        "",
        "Remedy: change the subscription",
    ]


def test_a_page_may_have_no_evidence():
    assert list(page(Explanation(Cause.DELAYED, "Later.", [], "wait"), 80)) == [
        "delayed: Later.",
        "",
        "",
        "Remedy: wait",
    ]


@pytest.mark.parametrize(
    ("cause", "code"),
    [(Cause.GROUP_UNKNOWN, 5), (Cause.NOT_STORED, 5), (Cause.WRONG_TOPIC, 5), (Cause.EXPIRED, 0), (Cause.WAITING, 0)],
)
@pytest.mark.parametrize("form", [[], ["--json"]])
def test_the_exit_code_says_whether_group_and_message_exist(cause, code, form, monkeypatch):
    async def explain(admin, topic, group, message):
        return Explanation(cause, "So it is.", [], "look")

    monkeypatch.setattr("rmqkit.admin.explain.explain", explain)
    done = rmq("explain", "Orders", "billing", "ID", "-n", "127.0.0.1:1", *form)
    assert (done.returncode, "So it is." in done.stdout, done.stderr) == (code, True, "")


@pytest.mark.parametrize(
    "named", [[], ["ID", "--key", "k"], ["--queue", "0"], ["--offset", "0"], ["ID", "-q", "0", "-o", "0"]]
)
def test_one_message_has_to_be_named(named, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["rmq", "explain", "Orders", "billing", *named])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "which message?" in capsys.readouterr().err

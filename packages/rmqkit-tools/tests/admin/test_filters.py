"""Filters tried out: part by part, and beside what the broker delivers."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from rmqkit import Message
from rmqkit.admin import Admin
from rmqkit.admin.messages.filters import apply_filter, parse_properties
from rmqkit.broker.settings import BrokerSettings
from rmqkit.cli.admin import filters as command
from rmqkit.errors import SettingsError
from rmqkit.standalone import Standalone
from tests.admin.test_waiting import printed
from tests.admin.things import send
from tests.filter.test_sql92 import REJECTED, WORKED_EXAMPLES

EXPRESSIONS = [expression for expression, _, verdict in WORKED_EXAMPLES if verdict != REJECTED]
MESSAGES = [one for _, one, _ in WORKED_EXAMPLES if all(one.values()) and "TAGS" not in one]


async def test_the_tester_agrees_with_the_broker_on_every_worked_example(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = BrokerSettings(listen_port=0, bind_address="127.0.0.1", property_filter=True)
    async with Standalone(tmp_path, broker=settings) as both, Admin(both.namesrv_address) as admin:
        await admin.topics.create("Orders", read_queues=1, write_queues=1)
        kinds = [dict(one) for one in dict.fromkeys(tuple(sorted(one.items())) for one in MESSAGES)]
        await send(admin, *(Message(topic="Orders", body=b"x", tags="paid", properties=one) for one in kinds))
        delivered = 0
        for expression in EXPRESSIONS:
            found = await admin.filters.test("Orders", expression, count=200)
            assert found.trouble == ""
            assert len(found.tested) == len(kinds)
            assert all(one.broker_says is one.wanted for one in found.tested), expression
            delivered += sum(one.wanted for one in found.tested)
        tags = await admin.filters.test("Orders", "new || paid", "TAG")
        text, parsed = printed(await command.try_filter(admin, "a > 5", topic="Orders"), capsys)
    assert delivered > len(EXPRESSIONS)
    assert all(one.wanted and one.broker_says for one in tags.tested)
    assert [(one.text, one.verdict) for one in tags.tested[0].part.parts] == [("new", False), ("paid", True)]
    assert "the broker differs in 0" in text and "(a > 5) is unknown" in text
    assert isinstance(parsed, dict) and parsed["expression"] == "a > 5"


async def test_a_broker_that_filters_by_tags_alone_says_so(tmp_path: Path) -> None:
    async with Standalone(tmp_path) as both, Admin(both.namesrv_address) as admin:
        await admin.topics.create("Orders", read_queues=1, write_queues=1)
        await send(admin, Message(topic="Orders", body=b"x", properties={"a": "7"}))
        found = await admin.filters.test("Orders", "a > 5")
    assert "does not support" in found.trouble
    assert [(one.wanted, one.broker_says) for one in found.tested] == [(True, None)]


async def test_without_a_topic_nobody_is_asked(capsys: pytest.CaptureFixture[str]) -> None:
    async with Admin("127.0.0.1:1") as admin:
        view = await command.try_filter(admin, "a > 5 OR b = 'x'", properties=["a=7.5", "c=1"])
        text, parsed = printed(view, capsys)
    assert text.splitlines() == [
        "not delivered",
        "((a > 5) || (b == 'x')): '7.5' is not an integer",
        "  (a > 5): '7.5' is not an integer",
        "    a: '7.5'",
        "  (b == 'x'): unknown",
        "    b: missing",
    ]
    assert msgspec.json.decode(msgspec.json.encode(parsed))["tested"][0]["wanted"] is False


@pytest.mark.parametrize(
    ("expression", "kind", "reason"),
    [("a >", "SQL92", "refused"), ("a" * 5000, "SQL92", "5,000"), ("||", "TAG", "no tag"), ("a", "CEL", "must be TAG")],
)
def test_what_cannot_be_tried(expression: str, kind: str, reason: str) -> None:
    with pytest.raises(SettingsError, match=reason):
        apply_filter(expression, kind, {})


def test_properties_are_lines() -> None:
    assert parse_properties("a=1\n\n b = x=y \r\n") == {"a": "1", "b": "x=y"}
    with pytest.raises(SettingsError, match="must be NAME=VALUE"):
        parse_properties("a")

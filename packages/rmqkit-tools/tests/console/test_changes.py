"""Changes: a form, a review, a confirmation that is done once, and the audit."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rmqkit.admin import Admin
from rmqkit.clock import SYSTEM_CLOCK
from rmqkit.console.access.audit import Audit, AuditLine
from rmqkit.console.access.confirmations import KEPT_MS, Review, Reviews
from rmqkit.errors import SettingsError
from rmqkit.protocol.message import Message
from tests.admin.things import send
from tests.console.asgi import Answer, served

FORM = {"body": '{"a": 1}', "tags": "new", "keys": "k1 k2", "properties": "country=DE\nweight=3", "queue": "1"}


def token_of(answer: Answer) -> str:
    found = re.search(r'name="review" value="([^"]+)"', answer.text)
    assert found, answer.text
    return found[1]


async def test_a_message_is_sent_once_however_often_it_is_confirmed(tmp_path: Path) -> None:
    async with served(tmp_path) as (both, console, browser), Admin(both.namesrv_address) as admin:
        await admin.topics.create("Orders", read_queues=4, write_queues=4)
        path = "/local/topics/Orders/send"
        review = await browser.post(path, FORM)
        assert "SEND_MESSAGE_V2" in review.text
        assert not any(one.max_offset for one in (await admin.topics.status("Orders")).queues)  # it was only looked at
        token = token_of(review)
        first, second = await browser.post(path, {"review": token}), await browser.post(path, {"review": token})
        assert (first.status, second.status) == (200, 200)
        assert first.text == second.text
        stored = await admin.messages.at("Orders", both.broker.context.settings.broker_name, 1, 0)
        assert (stored.body, stored.tags, stored.keys) == (b'{"a": 1}', "new", ["k1", "k2"])
        assert (stored.properties["country"], stored.properties["weight"]) == ("DE", "3")
        assert sum(one.max_offset for one in (await admin.topics.status("Orders")).queues) == 1
        assert [(one.action, one.outcome) for one in console.audit.lines()] == [("send", "done"), ("send", "intent")]
        assert '{"a"' not in "".join(one.detail for one in console.audit.lines())
        kept = await browser.get(path)
        assert "k1 k2" in kept.text  # the last one of this user


@pytest.mark.parametrize(
    ("field", "text", "why"),
    [
        ("body", "", "at least one byte"),
        ("queue", "one", "must be a number"),
        ("properties", "no sign", "must be name=value"),
        ("properties", "KEYS=x", "belongs to RocketMQ"),
        ("delay", "soon", "must be seconds"),
        ("at", "tomorrow", "must be like"),
    ],
)
async def test_a_field_that_cannot_be_used_is_said_in_the_form(tmp_path: Path, field: str, text: str, why: str) -> None:
    async with served(tmp_path) as (both, console, browser), Admin(both.namesrv_address) as admin:
        await admin.topics.create("Orders")
        answer = await browser.post("/local/topics/Orders/send", FORM | {field: text})
        assert answer.status == 400
        assert why in answer.text
        assert "k1 k2" in answer.text
        assert console.audit.lines() == []


async def test_nothing_is_sent_to_a_topic_without_a_route(tmp_path: Path) -> None:
    async with served(tmp_path) as (both, _, browser), Admin(both.namesrv_address) as admin:
        assert (await browser.post("/local/topics/Nowhere/send", FORM)).status == 404
        assert "Nowhere" not in await admin.calls.topic_names()


async def test_a_message_is_sent_again_and_copied(tmp_path: Path) -> None:
    async with served(tmp_path) as (both, console, browser), Admin(both.namesrv_address) as admin:
        await admin.topics.create("Orders", read_queues=1, write_queues=1)
        await admin.topics.create("Copies", read_queues=1, write_queues=1)
        (sent,) = await send(admin, Message(topic="Orders", body=b"x", properties={"a": "b"}))
        broker = both.broker.context.settings.broker_name
        path = f"/local/topics/Orders/at/{broker}/0/0"
        for form in ({"action": "resend"}, {"action": "copy", "to": "Copies"}):
            review = await browser.post(path, form)
            assert (await browser.post(path, {"review": token_of(review)})).status == 200
        again = await admin.messages.at("Orders", broker, 0, 1)
        copy = await admin.messages.at("Copies", broker, 0, 0)
        assert again.msg_id == sent.msg_id
        assert (copy.body, copy.properties["a"], copy.msg_id != sent.msg_id) == (b"x", "b", True)
        assert (await browser.post(path, {"action": "copy", "to": "Nowhere"})).status == 404
        assert (await browser.post(path, {"action": "burn"})).status == 400
        assert (await browser.post(path, {"action": "push", "client": ""})).status == 400
        assert [one.action for one in console.audit.lines() if one.outcome == "done"] == ["copy", "send again"]


async def test_a_change_that_fails_is_a_line_too(tmp_path: Path) -> None:
    async with served(tmp_path) as (both, console, browser), Admin(both.namesrv_address) as admin:
        await admin.topics.create("Orders", read_queues=1, write_queues=1)
        path = "/local/topics/Orders/send"
        token = token_of(await browser.post(path, FORM | {"queue": "7"}))
        assert (await browser.post(path, {"review": token})).status == 502
        assert console.audit.lines()[0].outcome == "failed"
        assert "no queue 7" in console.audit.lines()[0].detail


async def test_a_review_is_its_users_and_not_for_ever(tmp_path: Path) -> None:
    class Clock:
        now = 0.0

        def monotonic_ms(self) -> float:
            return self.now

    async def run() -> None: ...

    clock = Clock()
    reviews = Reviews(clock)  # type: ignore[arg-type]
    review = Review(user="a", env="e", action="x", target="t", rows=[], requests=[], command="", back="", run=run)
    token = reviews.open(review)
    assert reviews.find(token, "a") is review
    assert reviews.find(token, "b") is None
    clock.now = KEPT_MS + 1
    assert reviews.find(token, "a") is None


def test_the_audit_is_a_file_that_a_new_start_reads(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "audit.jsonl"
    audit = Audit(path, SYSTEM_CLOCK)
    audit.write("anna", "10.0.0.1", "prod", "send", "Orders", "intent")
    audit.write("anna", "10.0.0.1", "prod", "send", "Orders", "done", "SEND_OK")
    audit.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["user"], line["outcome"], line.get("detail")) for line in lines] == [
        ("anna", "intent", None),
        ("anna", "done", "SEND_OK"),
    ]
    path.write_text(path.read_text() + "not json\n")
    again = Audit(path, SYSTEM_CLOCK)
    assert [line.outcome for line in again.lines()] == ["done", "intent"]
    assert [line.outcome for line in again.lines("send_ok")] == ["done"]
    assert isinstance(again.lines()[0], AuditLine)
    again.close()


def test_an_audit_that_cannot_be_written_is_said_at_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match="audit file"):
        Audit(tmp_path / "file" / "audit.jsonl", SYSTEM_CLOCK)

"""Dead letters: who has them, of which kinds they are, and what a replay of some would send."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rmqkit.admin import Admin
from rmqkit.admin.messages.listing import Budget
from rmqkit.admin.replay.dead import check_by, grouped, kind_of
from rmqkit.admin.replay.selection import Selection, preview
from rmqkit.errors import SettingsError, UnknownName
from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.command import request
from rmqkit.protocol.message import ReceivedMessage
from rmqkit.protocol.names import AUTO_CREATE_TOPIC, dlq_topic
from rmqkit.protocol.properties import encode_properties
from rmqkit.protocol.schemas.send import SendMessageV2Request
from rmqkit.remoting.client import expect_success
from rmqkit.standalone import Standalone
from tests.cli.in_process import rmq
from tests.client.messages import received

KINDS = [
    (b'{"order": 1, "price": 2}', {"TAGS": "paid", "DLQ_ORIGIN_TOPIC": "Orders"}, "Orders · paid · JSON order, price"),
    (b"plain", {"DLQ_ORIGIN_TOPIC": "Orders", "rmqkit_reason": "no user 17\nof 3"}, "Orders · no tag · no user # of #"),
    (b"\xff\x00", {"DLQ_ORIGIN_TOPIC": "Emails"}, "Emails · no tag · bytes"),
]  # fmt: skip


async def die(admin: Admin, group: str, count: int) -> None:
    """Store dead letters of the three kinds in turn, as a broker would."""
    await admin.topics.create(dlq_topic(group), read_queues=1, write_queues=1)
    (address,) = (await admin.calls.masters()).values()
    for number in range(count):
        body, properties, _ = KINDS[number % len(KINDS)]
        told = properties | {"UNIQ_KEY": f"{number:032X}", "KEYS": f"k{number}"}
        text = encode_properties(told).decode()
        header = SendMessageV2Request("g", dlq_topic(group), AUTO_CREATE_TOPIC, 1, 0, 0, 1_700_000_000_000, 0, text)
        expect_success(await admin.calls.call(address, request(RequestCode.SEND_MESSAGE_V2, header, body)), address)


def dead(body: bytes, **properties: str) -> ReceivedMessage:
    return received(0, body, topic="%DLQ%g", properties=properties)


@pytest.mark.parametrize(("body", "properties", "kind"), KINDS)
def test_the_kind_of_a_dead_letter(body: bytes, properties: dict[str, str], kind: str) -> None:
    assert kind_of(dead(body, **properties)) == kind


@pytest.mark.parametrize(
    ("by", "value"),
    [
        *(("topic", "Orders"), ("tag", "paid"), ("reason", "no reason"), ("shape", "JSON a")),
        *(("property:x", "y"), ("host", "127.0.0.1")),
    ],
)
def test_other_ways_to_distinguish_them(by: str, value: str) -> None:
    message = dead(b'{"a": 1}', TAGS="paid", DLQ_ORIGIN_TOPIC="Orders", x="y")
    assert kind_of(message, check_by(by)) == value


@pytest.mark.parametrize("first", ["10.1.2.3:4711", "10.1.2.3"])
def test_the_host_of_a_dead_letter_is_the_one_that_its_message_was_first_sent_from(first: str) -> None:
    assert kind_of(dead(b"x", __BORNHOST=first), "host") == "10.1.2.3"


@pytest.mark.parametrize(
    ("body", "shape"),
    [(b"", "empty"), (b"[1]", "JSON list"), (b"{}", "JSON without keys"), (b"{x", "text that begins like JSON")],
)
def test_shapes_of_bodies(body: bytes, shape: str) -> None:
    assert kind_of(dead(body), "shape") == shape


@pytest.mark.parametrize("by", ["", "colour", "property:"])
def test_an_unknown_way_is_refused(by: str) -> None:
    with pytest.raises(SettingsError, match="must be kind"):
        check_by(by)


def test_nothing_has_no_kinds() -> None:
    assert grouped([]) == []


async def test_groups_kinds_and_a_dry_run(tmp_path: Path) -> None:
    async with Standalone(tmp_path) as both, Admin(both.namesrv_address) as admin:
        assert await admin.dead.groups() == []
        with pytest.raises(UnknownName):
            await admin.dead.kinds("billing")
        await die(admin, "billing", 7)
        assert [(one.group, one.count) for one in await admin.dead.groups()] == [("billing", 7)]
        found = await admin.dead.kinds("billing")
        assert {one.kind: one.count for one in found.kinds} == dict(
            zip([kind for *_, kind in KINDS], (3, 2, 2), strict=True)
        )
        assert found.kinds[0].example == f"{both.broker.context.settings.broker_name}:0:6"
        assert (found.is_whole, found.total) == (True, 7)
        part = await admin.dead.kinds("billing", "tag", Budget(messages=2))
        assert (part.examined, part.is_whole, part.kinds[0].count) == (2, False, 1)
        selection = Selection(dlq_topic("billing"), kinds=(KINDS[0][2], KINDS[2][2]))
        shown = await preview(admin.calls, selection, None)
        assert (shown.count, shown.targets, shown.doubles) == (5, {"Orders": 3, "Emails": 2}, 0)
        assert (await preview(admin.calls, selection, "Elsewhere")).targets == {"Elsewhere": 5}


def test_the_command_prints_groups_and_kinds(tmp_path: Path) -> None:
    import asyncio

    async def session() -> tuple[str, str, str]:
        async with Standalone(tmp_path) as both, Admin(both.namesrv_address) as admin:
            await die(admin, "billing", 4)
            servers = ("-n", both.namesrv_address)
            run = asyncio.to_thread
            return (
                (await run(rmq, "dead", "list", *servers)).stdout,
                (await run(rmq, "dead", "kinds", "billing", "--by", "topic", "--json", *servers)).stdout,
                (await run(rmq, "dead", "kinds", "shipping", *servers)).stdout,
            )

    listed, kinds, nothing = asyncio.run(session())
    assert listed.splitlines()[1].split()[:2] == ["billing", "4"]
    assert [one["kind"] for one in json.loads(kinds)["kinds"]] == ["Orders", "Emails"]
    assert nothing.startswith("group shipping has no dead letters; the groups that have: rmq dead list")

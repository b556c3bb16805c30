"""A read-only connection: each request passes the guard, and `READING` has no code of an administrator's handler."""

from __future__ import annotations

from collections import Counter
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages

import pytest

import rmqkit.broker
import rmqkit.namesrv
from rmqkit.admin import Admin, read_only
from rmqkit.admin.calls import READING
from rmqkit.admin.pulls import AdminPuller, pull_request
from rmqkit.errors import ReadOnly
from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.command import Command, request
from rmqkit.protocol.message import Message
from rmqkit.protocol.schemas.clients import MessageQueue
from rmqkit.protocol.schemas.pull import PullFlag, PullMessageRequest
from rmqkit.standalone import Standalone

SHOW_USERS = {RequestCode.AUTH_GET_USER, RequestCode.AUTH_LIST_USER}
"""For admins alone, as what they tell is nobody else's; they change nothing."""


def answered_for_admins() -> set[int]:
    """The codes that our servers answer to admins alone."""
    codes = set()
    for package in (rmqkit.broker, rmqkit.namesrv):
        for found in walk_packages(package.__path__, f"{package.__name__}."):
            for kind in vars(import_module(found.name)).values():
                for method in vars(kind).values() if isinstance(kind, type) else ():
                    codes |= {one.code for one in getattr(method, "answered", ()) if one.admins_only}
    return codes


def test_no_request_that_changes_a_server_counts_as_reading() -> None:
    changing = answered_for_admins() - SHOW_USERS
    assert len(changing) > 20
    assert READING.isdisjoint(changing)
    assert RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG not in READING  # Apache's broker creates the group


@pytest.mark.parametrize("code", sorted(set(RequestCode) - READING))
def test_what_is_no_reading_is_refused(code: int) -> None:
    with pytest.raises(ReadOnly, match=RequestCode(code).name):
        read_only("127.0.0.1:1", request(code))


def test_a_pull_that_commits_is_refused() -> None:
    queue = MessageQueue("T", "b", 0)
    header = pull_request(queue, 0, "*", 0)
    read_only("b:1", request(RequestCode.PULL_MESSAGE, header))
    committing = PullMessageRequest("g", "T", 0, 0, 32, int(PullFlag.COMMIT_OFFSET), 5, 0, 0, "*", "TAG")
    with pytest.raises(ReadOnly):
        read_only("b:1", request(RequestCode.PULL_MESSAGE, committing))


async def test_every_request_passes_the_guard(tmp_path: Path) -> None:
    asked: Counter[int] = Counter()

    def guard(address: str, command: Command) -> None:
        asked[command.code] += 1
        read_only(address, command)

    async with Standalone(tmp_path) as both, Admin(both.namesrv_address, guard=guard) as admin:
        broker = both.broker.context.settings.broker_name
        await admin.clusters.brokers()
        await admin.groups.tables()
        queue = MessageQueue("SELF_TEST_TOPIC", broker, 0)
        await AdminPuller(admin.calls).pull(queue, 0)
        with pytest.raises(ReadOnly):
            await admin.topics.create("T", broker=broker)
        with pytest.raises(ReadOnly):
            await admin.messages.send(Message(topic=broker, body=b"x"))
        assert "T" not in await admin.topics.names()
        assert asked[RequestCode.PULL_MESSAGE] == 1
        assert asked[RequestCode.UPDATE_AND_CREATE_TOPIC] == 1
        assert asked[RequestCode.GET_BROKER_RUNTIME_INFO] == 1

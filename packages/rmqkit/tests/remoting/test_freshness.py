"""Requests that are taken once, and not long after they were signed."""

from __future__ import annotations

import random

import pytest

from rmqkit.protocol.acl import FullSignature
from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.command import Command
from rmqkit.remoting import authentication
from rmqkit.remoting.authentication import AuthenticationSettings, Credentials, Freshness
from rmqkit.remoting.client import RemotingClient
from rmqkit.standalone import Standalone

NOW_MS = 1_800_000_000_000
WINDOW_MS = 300_000


def asked(fresh, number, session="s", signed_ms=NOW_MS, now_ms=NOW_MS, user="anna"):
    return fresh.fault(user, FullSignature(signed_ms, session, number), now_ms)


def test_each_number_of_a_session_is_taken_once_in_any_order():
    numbers = list(range(1, 2000))
    random.Random(7).shuffle(numbers)
    fresh = Freshness(WINDOW_MS)
    assert [asked(fresh, number) for number in numbers] == [None] * len(numbers)
    assert {asked(fresh, number) for number in numbers} == {"it came before"}
    assert asked(fresh, 1, session="t") is None and asked(fresh, 1, user="bert") is None


@pytest.mark.parametrize("ahead", [8191, 8192, 8193, 1 << 62])
def test_what_is_far_behind_counts_as_seen(ahead):
    fresh = Freshness(WINDOW_MS)
    assert asked(fresh, 1) is None and asked(fresh, 1 + ahead) is None
    assert asked(fresh, 1) == "it came before"
    assert asked(fresh, ahead) is None


@pytest.mark.parametrize(("away_ms", "taken"), [(WINDOW_MS, True), (-WINDOW_MS, True), (WINDOW_MS + 1, False)])
def test_the_window_is_open_to_both_sides(away_ms, taken):
    assert (asked(Freshness(WINDOW_MS), 1, signed_ms=NOW_MS - away_ms) is None) is taken


def test_sessions_are_bounded_and_forgotten_when_they_are_too_old(monkeypatch):
    monkeypatch.setattr(authentication, "_SESSIONS_MAX", 3)
    fresh = Freshness(WINDOW_MS)
    assert [asked(fresh, 1, session=str(number)) for number in range(3)] == [None] * 3
    assert "more than 3 clients" in str(asked(fresh, 1, session="new"))
    later_ms = NOW_MS + WINDOW_MS + 1
    assert asked(fresh, 1, session="new", signed_ms=later_ms, now_ms=later_ms) is None
    assert asked(fresh, 1, session="0", now_ms=later_ms) is not None


async def test_our_clients_are_taken_where_full_signatures_are_required(tmp_path):
    users = AuthenticationSettings(
        enabled=True, initial_user='{"username":"root","password":"secret12"}', full_signatures_only=True
    )

    async with Standalone(tmp_path, authentication=users) as servers:
        client = RemotingClient(credentials=Credentials(access_key="root", secret_key="secret12"))
        again = Command(RequestCode.GET_TOPIC_CONFIG, fields={"topic": "TBW102"})
        for _ in range(3):
            answer = await client.call(servers.broker_address, again, 60_000)
            assert answer.code == 0, answer.remark
        await client.close()

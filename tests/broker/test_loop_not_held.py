"""No request, whoever sends it, holds the event loop of a broker or a name server for long."""

from __future__ import annotations

import asyncio

import pytest
import uvloop

from tests.loop_held import MAX_SECONDS, held, table

JUDGED_BY_TOPIC = ("41 ", "42 ", "200151 ")
"""Their bodies name thousands of topics, each of which is judged by every policy at once: up to 0.6 s (tuning.md)."""


@pytest.mark.parametrize(
    ("run", "has_users"), [(asyncio.run, False), (uvloop.run, True)], ids=["asyncio", "users on uvloop"]
)
def test_no_request_at_its_bounds_holds_the_loop_of_broker_or_name_server(tmp_path, run, has_users):
    found = run(held(tmp_path, is_long=False, has_users=has_users))
    print(table(found, 25))
    assert len(found) > 400
    known = JUDGED_BY_TOPIC if has_users else ()
    assert [one for one in found if one.seconds > MAX_SECONDS and not one.name.startswith(known)] == []

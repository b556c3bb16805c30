"""A SIGKILL at a random moment loses no acknowledged message, with both kinds of flushing: six kills. ``make kill
T=store`` has hundreds."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from rmqkit.store.settings import FlushDiskType
from tests.examples import chosen_seed
from tests.faults.kills import Kills, kill_settings

WAYS: list[Any] = [
    pytest.param(FlushDiskType.SYNC_FLUSH, {}, id="sync"),
    pytest.param(FlushDiskType.ASYNC_FLUSH, {"enable_consume_queue_ext": True}, id="async"),
]


@pytest.mark.faults
@pytest.mark.parametrize(("flush_disk_type", "changes"), WAYS)
def test_nothing_acknowledged_is_lost(tmp_path: Path, flush_disk_type: FlushDiskType, changes: dict[str, Any]) -> None:
    seed = chosen_seed()
    kills = Kills(tmp_path / "s", kill_settings(flush_disk_type, **changes), random.Random(seed))
    while kills.kills < 3:
        kills.kill()
    assert kills.acknowledged > 0, "messages were put"

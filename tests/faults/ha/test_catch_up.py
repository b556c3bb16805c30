"""A slave that restarts 64 MiB behind its master. ``make bench T=ha ARGS="--gib 10"`` is the long form, with
figures.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from bench.ha_bench import ASYNC, catch_up, group, run_ours
from bench.ha_load import Load
from tests.interop.replicas import log_difference
from tests.interop.standalone import run_name_server

pytestmark = [pytest.mark.faults, pytest.mark.slow]

_BEHIND_BYTES = 64 << 20


@pytest.mark.timeout(900)
def test_a_slave_that_was_stopped_for_a_while_has_all_of_it_in_the_end(tmp_path: Path) -> None:
    with run_name_server(tmp_path) as (_, namesrv), group(partial(run_ours, tmp_path, namesrv), "ours", ASYNC) as pair:
        figures = catch_up(Load(1024), pair, _BEHIND_BYTES)  # until the slave's queues equal the master's too
        end = pair.replication().master_commit_log_max_offset
    print(figures)
    assert end > _BEHIND_BYTES
    stores = [tmp_path / home / "store" for home in ("ours-0", "ours-1")]
    assert log_difference(*stores, end) is None

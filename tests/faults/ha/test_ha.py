"""Replication under kills, in short: four kills, and two split histories. ``make kill T=ha`` is the long form."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from tests.examples import chosen_seed
from tests.faults.client.ledger import Acknowledged, Ledger, Place
from tests.faults.ha.crash import crash
from tests.faults.ha.history import History, Message, body_of, verdict
from tests.faults.ha.pair import BROKER, MASTER, SLAVE, TOPIC, store_settings
from tests.faults.ha.split import SPLITS, Split, judge
from tests.store.stores import message, opened

pytestmark = pytest.mark.faults


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_four_kills_lose_nothing_acknowledged_and_leave_one_history(tmp_path: Path) -> None:
    seed = chosen_seed()
    outcome = asyncio.run(crash(tmp_path, kills=4, seed=seed))
    print(outcome.table())
    assert outcome.faults == []
    assert outcome.kills.total() >= 4
    assert outcome.acknowledged > 50
    assert min(outcome.served[MASTER], outcome.served[SLAVE]) >= outcome.acknowledged


@pytest.mark.parametrize("split", [SPLITS[0], SPLITS[4]], ids=lambda split: split.name)
def test_a_slave_with_a_history_of_its_own_stops_and_says_where(split: Split, tmp_path: Path) -> None:
    print(asyncio.run(judge(split, tmp_path)))


def test_a_place_that_was_two_messages_is_a_split_history() -> None:
    history, place = History(), Place("broker-a/0", 7)
    history.note(MASTER, place, Message("A1", 100, 5))
    history.note(SLAVE, place, Message("A1", 100, 5))
    assert history.splits == []
    history.note(SLAVE, place, Message("B1", 100, 5))
    assert len(history.splits) == 1


@pytest.fixture
def copies(tmp_path: Path) -> tuple[dict[str, Path], int, Ledger]:
    """Return a master's store, its slave's, the ends of their logs, and the acknowledged messages."""
    stores, ledger = {role: tmp_path / role for role in (MASTER, SLAVE)}, Ledger()
    with opened(stores[MASTER], store_settings()) as store:
        for number in range(5):
            put = store.put(message(TOPIC, 0, body_of(number), UNIQ_KEY=f"K{number}"))
            ledger.acknowledged[number] = Acknowledged(Place(f"{BROKER}/0", put.queue_offset), f"K{number}", 0.0)
        store.dispatch()
        end = store.max_physical_offset
    shutil.copytree(stores[MASTER], stores[SLAVE])
    return stores, end, ledger


def test_equal_copies_of_what_was_acknowledged_are_in_order(copies: tuple[dict[str, Path], int, Ledger]) -> None:
    stores, end, ledger = copies
    assert verdict(stores, store_settings(), end, ledger, History()) == []


def test_what_is_lost_changed_or_was_served_otherwise_is_found(copies: tuple[dict[str, Path], int, Ledger]) -> None:
    stores, end, ledger = copies
    history = History()
    history.note(SLAVE, Place(f"{BROKER}/0", 4), Message("other", 7, 7))
    faults = verdict(stores, store_settings(), end, ledger, history)
    assert [fault.partition(":")[0] for fault in faults if "was served as" in fault] == [MASTER, SLAVE]
    ledger.acknowledged[5] = Acknowledged(Place(f"{BROKER}/0", 5), "K5", 0.0)
    assert all("5 is not where it was" in fault for fault in verdict(stores, store_settings(), end, ledger, History()))
    (log,) = (stores[SLAVE] / "commitlog").iterdir()
    with log.open("r+b") as file:
        file.seek(end - 1)
        file.write(b"?")
    assert verdict(stores, store_settings(), end, ledger, History())[0].startswith("the logs differ")

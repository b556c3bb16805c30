"""Locks of ordered consumption: their holders and their expiry (behaviour.md §2.7)."""

from __future__ import annotations

import asyncio

import pytest

from rmqkit.broker.tables.clients import LOCK_MS_MAX, QueueLocks
from rmqkit.protocol.schemas.clients import MessageQueue
from rmqkit.testing.clock import StandingClock

QUEUES = [MessageQueue("T", "broker-a", number) for number in range(3)]


@pytest.fixture
def clock():
    return StandingClock()


@pytest.fixture
def locks(clock):
    return QueueLocks(clock)


def test_a_free_queue_is_granted_and_a_held_one_is_not(locks):
    assert locks.lock("g", "c1", QUEUES[:2]) == QUEUES[:2]
    assert locks.lock("g", "c2", QUEUES) == QUEUES[2:]
    assert locks.lock("g", "c1", QUEUES) == QUEUES[:2]


def test_groups_do_not_know_each_other(locks):
    locks.lock("g", "c1", QUEUES)
    assert locks.lock("h", "c2", QUEUES) == QUEUES


def test_a_lock_that_is_not_renewed_is_anybody_s_after_a_minute(locks, clock):
    locks.lock("g", "c1", QUEUES)
    clock.ms += LOCK_MS_MAX
    assert locks.lock("g", "c2", QUEUES) == []
    clock.ms += 1
    assert locks.lock("g", "c2", QUEUES) == QUEUES


def test_a_lock_that_is_renewed_lives_on(locks, clock):
    locks.lock("g", "c1", QUEUES)
    clock.ms += LOCK_MS_MAX - 1
    locks.lock("g", "c1", QUEUES)
    clock.ms += LOCK_MS_MAX - 1
    assert locks.lock("g", "c2", QUEUES) == []


def test_only_its_owner_gives_a_lock_back(locks):
    locks.lock("g", "c1", QUEUES)
    locks.unlock("g", "c2", QUEUES)
    assert locks.lock("g", "c2", QUEUES) == []
    locks.unlock("g", "c1", QUEUES[:1])
    assert locks.lock("g", "c2", QUEUES) == QUEUES[:1]
    locks.unlock("nobody", "c1", QUEUES)


def test_a_group_consumes_in_order_while_it_holds_a_lock(locks, clock):
    assert not locks.is_any_held("g")
    locks.lock("g", "c1", QUEUES[:1])
    clock.ms += 30_000
    locks.lock("g", "c1", QUEUES[1:2])
    clock.ms += 30_001
    assert locks.is_any_held("g")
    clock.ms += 30_000
    assert not locks.is_any_held("g")
    locks.lock("g", "c1", QUEUES[:1])
    locks.unlock("g", "c1", QUEUES)
    assert not locks.is_any_held("g")


def test_expired_locks_are_forgotten(locks, clock):
    locks.lock("g", "c1", QUEUES)
    locks.lock("h", "c1", QUEUES[:1])
    clock.ms += LOCK_MS_MAX
    locks.lock("g", "c1", QUEUES[:1])
    clock.ms += 1
    asyncio.run(locks.drop_expired())
    assert {group: list(held) for group, held in locks.groups.items()} == {"g": QUEUES[:1]}
    assert locks.lock("g", "c2", QUEUES) == QUEUES[1:]

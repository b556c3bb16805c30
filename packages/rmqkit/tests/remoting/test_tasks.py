"""Owned tasks and repeated work."""

from __future__ import annotations

import asyncio
import errno
import logging

import pytest

from rmqkit.errors import NoRoute
from rmqkit.remoting.tasks import Tasks, keep_doing, repeat
from tests.client.peers import until


async def test_tasks_have_names_and_end_with_their_owner():
    tasks = Tasks()
    task = tasks.start(asyncio.Event().wait(), "waiting for ever")
    assert task.get_name() == "waiting for ever"
    await tasks.close()
    assert task.cancelled()


async def test_the_error_of_an_owned_task_is_its_caller_s(caplog):
    async def fail() -> None:
        raise NoRoute("no broker")

    tasks = Tasks()
    with pytest.raises(NoRoute):
        await tasks.own(fail(), "route")
    assert (len(tasks), caplog.records) == (0, [])


async def test_an_owner_can_wait_until_its_tasks_end_by_themselves():
    gate, ended = asyncio.Event(), []

    async def work() -> None:
        await gate.wait()
        ended.append(1)

    tasks = Tasks()
    tasks.start(work(), "work")
    finishing = asyncio.create_task(tasks.finish())
    await asyncio.sleep(0)
    assert not finishing.done()
    gate.set()
    await finishing
    assert (ended, len(tasks)) == ([1], 0)


async def test_periodic_work_continues_after_a_failure_until_it_is_ended(caplog):
    end, rounds = asyncio.Event(), []

    def work() -> None:
        rounds.append(1)
        if len(rounds) == 1:
            raise ValueError("broken")

    working = asyncio.create_task(repeat(work, name="test", seconds=0.001, end=end, first_seconds=0))
    await until(lambda: len(rounds) >= 3, "rounds after the failure")
    end.set()
    await working
    assert caplog.text.count("test: a round failed") == 1


async def test_periodic_work_that_fails_on_and_on_is_reported_once_a_reason(caplog):
    """A full disk lasts for days, and some work is done every second."""
    end, reasons = asyncio.Event(), iter(["full", "full", "full", "", "full", "broken", "broken"])

    def work() -> None:
        reason = next(reasons, None)
        if reason is None:
            end.set()
        elif reason:
            raise OSError(errno.ENOSPC, reason) if reason == "full" else ValueError(reason)

    with caplog.at_level(logging.DEBUG):
        await repeat(work, name="test", seconds=0.001, end=end, first_seconds=0)
    told = [(one.getMessage(), bool(one.exc_info)) for one in caplog.records if one.name == "rmqkit.remoting.tasks"]
    full = "test: a round failed: [Errno 28] full"
    assert told == [(full, False), (full, False), ("test: a round failed: broken", True)]


async def test_work_that_a_disk_refuses_is_one_line_each_reason_and_continues(caplog):
    reasons, end = iter(["full"] * 5), asyncio.Event()

    async def action() -> float:
        if (reason := next(reasons, None)) is not None:
            raise OSError(errno.ENOSPC, reason)
        end.set()
        return 60_000.0

    tasks = Tasks()
    with caplog.at_level(logging.DEBUG):
        tasks.start(keep_doing(action, wake=asyncio.Event(), name="test", gap_ms=0, pause_after_error_ms=0), "test")
        await until(end.is_set, "the round after the failures")
    await tasks.close()
    told = [(one.getMessage(), one.exc_info) for one in caplog.records if one.name == "rmqkit.remoting.tasks"]
    assert told == [("test: [Errno 28] full", None)]


async def test_a_task_that_fails_is_logged_with_its_name(caplog):
    async def fail() -> None:
        raise ValueError("broken")

    tasks = Tasks()
    task = tasks.start(fail(), "doing things")
    await until(task.done, "the failure")
    await tasks.close()
    assert "task doing things ended with an error" in caplog.text


@pytest.mark.real_time  # the pause is not to pass
async def test_work_is_repeated_and_a_wake_up_ends_the_pause():
    wake, rounds = asyncio.Event(), []

    async def action() -> float:
        rounds.append(1)
        return 0.0 if len(rounds) < 3 else 60_000.0

    tasks = Tasks()
    tasks.start(keep_doing(action, wake=wake, name="test", gap_ms=0), "test")
    await until(lambda: len(rounds) == 3, "three rounds without pause")
    wake.set()
    await until(lambda: len(rounds) == 4, "a round after the wake-up")
    await tasks.close()


@pytest.mark.real_time  # the pause is not to pass
async def test_a_wake_up_during_the_work_leads_to_one_more_round():
    wake, gate, rounds = asyncio.Event(), asyncio.Event(), []

    async def action() -> float:
        rounds.append(1)
        await gate.wait()
        return 60_000.0

    tasks = Tasks()
    tasks.start(keep_doing(action, wake=wake, name="test", gap_ms=0), "test")
    await until(lambda: rounds, "the first round")
    wake.set()
    wake.set()
    gate.set()
    await until(lambda: len(rounds) == 2, "one more round")
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(rounds) == 2
    await tasks.close()


async def test_errors_are_logged_and_the_work_continues(caplog):
    errors = [NoRoute("no name server answered"), ValueError("a defect")]
    rounds = []

    async def action() -> float:
        rounds.append(1)
        if errors:
            raise errors.pop(0)
        return 60_000.0

    tasks = Tasks()
    tasks.start(keep_doing(action, wake=asyncio.Event(), name="test", gap_ms=0, pause_after_error_ms=0), "test")
    await until(lambda: len(rounds) == 3, "three rounds")
    await tasks.close()
    assert "test: no name server answered" in caplog.text
    assert "a defect" in caplog.text


async def test_the_same_error_is_logged_again_only_when_it_worked_in_between(caplog):
    outcomes = [NoRoute("gone"), NoRoute("gone"), None, NoRoute("gone"), NoRoute("elsewhere")]

    async def action() -> float:
        if not outcomes:
            return 60_000.0
        if (outcome := outcomes.pop(0)) is not None:
            raise outcome
        return 0.0

    tasks = Tasks()
    tasks.start(keep_doing(action, wake=asyncio.Event(), name="test", gap_ms=0, pause_after_error_ms=0), "test")
    await until(lambda: not outcomes, "all rounds")
    await tasks.close()
    assert caplog.messages == ["test: gone", "test: gone", "test: elsewhere"]


@pytest.mark.real_time  # the pause is not to pass
async def test_many_wake_ups_do_not_make_it_run_all_the_time():
    wake, rounds = asyncio.Event(), []

    async def action() -> float:
        rounds.append(1)
        return 60_000.0

    tasks = Tasks()
    tasks.start(keep_doing(action, wake=wake, name="test", gap_ms=60_000), "test")
    await until(lambda: rounds, "the first round")
    for _ in range(50):
        wake.set()
        await asyncio.sleep(0)
    assert len(rounds) == 1
    await tasks.close()

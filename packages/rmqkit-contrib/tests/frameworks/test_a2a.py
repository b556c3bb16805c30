"""A2A agents of the official SDK with task events in streams: kills, other processes, versions, expiry."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, aclosing, asynccontextmanager

import httpx
import pytest
from a2a.client.client import ClientConfig
from a2a.client.client_factory import create_client
from a2a.client.errors import A2AClientError
from a2a.helpers.proto_helpers import new_text_artifact, new_text_message
from a2a.server.cluster import TaskVersion, VersionedEvent
from a2a.server.context import ServerCallContext
from a2a.server.request_handlers import DefaultRequestHandler
from a2a.server.tasks import InMemoryTaskStore
from a2a.types.a2a_pb2 import (
    CancelTaskRequest,
    Role,
    SendMessageRequest,
    SubscribeToTaskRequest,
    Task,
    TaskArtifactUpdateEvent,
    TaskState,
    TaskStatus,
    TaskStatusUpdateEvent,
)
from a2a.utils.errors import InternalError

import rmqkit
from rmqkit.a2a import TaskStreams
from rmqkit.errors import ClientError, RmqError
from tests.frameworks.a2a_server import Counter, agent_card
from tests.frameworks.processes import Processes
from tests.streams.test_streams import Servers

SECONDS_MAX = 120


def sent(text, **ids):
    return SendMessageRequest(message=new_text_message(text, role=Role.ROLE_USER, **ids))


def parts(task):
    return [part.text for artifact in task.artifacts for part in artifact.parts]


def shown(response):
    """Return an event as a text."""
    match response.WhichOneof("payload"):
        case "task":
            return f"task with {len(parts(response.task))} parts"
        case "artifact_update":
            return response.artifact_update.artifact.parts[0].text
        case "status_update":
            return TaskState.Name(response.status_update.status.state).removeprefix("TASK_STATE_").lower()


@asynccontextmanager
async def agent(port):
    """A client of the agent at a port."""
    async with httpx.AsyncClient(timeout=SECONDS_MAX) as http:
        yield await create_client(agent_card(f"http://127.0.0.1:{port}/"), ClientConfig(httpx_client=http))


async def begun(processes):
    """Start a process and a task. Kill the process when the agent has sent three parts. Return the task."""
    async with agent(await processes.start()) as client, aclosing(client.send_message(sent("count"))) as answers:
        task = (await anext(answers)).task
        assert [shown(await anext(answers)) for _ in range(3)] == ["part 0", "part 1", "part 2"]
        processes.kill()
        with pytest.raises(A2AClientError):
            await anext(answers)
        return task


@pytest.mark.real_time
@pytest.mark.parametrize(
    ("store", "old"),
    [
        ("no-versions", ["task with 0 parts", "part 0", "part 1", "part 2"]),
        pytest.param("versions", [], marks=pytest.mark.slow),
    ],
)
async def test_a_subscription_after_a_kill_of_the_server_gets_every_event(tmp_path, store, old):
    async with asyncio.timeout(SECONDS_MAX):
        with Processes("a2a_server.py", tmp_path, store) as processes:
            task = await begun(processes)
            port = await processes.start()
            async with agent(port) as client, agent(port) as other:
                events = client.subscribe(SubscribeToTaskRequest(id=task.id))
                first = [shown(await anext(events)) for _ in range(1 + len(old))]
                assert first == ["task with 3 parts", *old]
                async for _ in other.send_message(sent("go on", task_id=task.id, context_id=task.context_id)):
                    pass
                assert [shown(one) async for one in events] == ["part 3", "part 4", "completed"]


# ---------------------------------------------------------------- the streams of tasks


@asynccontextmanager
async def task_streams(tmp_path, settings=None, **options):
    """Servers, and the task streams of two processes."""
    async with AsyncExitStack() as stack:
        servers = await stack.enter_async_context(Servers(tmp_path, **(settings or {})))
        one, two = [
            await stack.enter_async_context(TaskStreams(rmqkit.streams.open(servers.address, "Tasks", **options)))
            for _ in range(2)
        ]
        yield servers, one, two


def status(state, task_id="t"):
    return TaskStatusUpdateEvent(task_id=task_id, context_id="c", status=TaskStatus(state=state))


WORKING, ASKS, DONE = (
    status(TaskState.TASK_STATE_WORKING),
    status(TaskState.TASK_STATE_INPUT_REQUIRED),
    status(TaskState.TASK_STATE_COMPLETED),
)
PART = TaskArtifactUpdateEvent(task_id="t", context_id="c", artifact=new_text_artifact("a", "x"))


async def published(streams, *events, task_id="t", first=1):
    """Publish events with the versions from ``first`` on."""
    for i, event in enumerate(events, first):
        await streams.publish(task_id, VersionedEvent(event, TaskVersion(i)))


async def read(streams, after=TaskVersion.MISSING, task_id="t"):
    """Return the events and versions of a subscription that ends."""
    return [(one.event, one.version) async for one in streams.subscribe(task_id, after=after)]


async def test_a_subscription_begins_after_any_version_and_ends_with_the_task(tmp_path):
    async with task_streams(tmp_path) as (_, one, two):
        events = [Task(id="t", context_id="c"), WORKING, PART, ASKS, PART, DONE]
        await published(one, *events)
        everything = [(event, TaskVersion(i)) for i, event in enumerate(events, 1)]
        assert await read(two) == everything
        for i in range(len(events) + 1):
            assert await read(two, TaskVersion(i)) == everything[i:]


@pytest.mark.parametrize("last", [DONE, status(TaskState.TASK_STATE_FAILED), new_text_message("hello")])
async def test_a_subscriber_gets_events_of_another_process_as_they_are_published(tmp_path, last):
    async with task_streams(tmp_path) as (_, one, two):
        reading = asyncio.create_task(read(two))
        for i, event in enumerate((WORKING, PART, last), 1):
            await asyncio.sleep(30)
            assert not reading.done()
            await published(one, event, first=i)
        assert [event for event, _ in await reading] == [WORKING, PART, last]


async def test_events_of_stores_without_versions_are_all_delivered(tmp_path):
    async with task_streams(tmp_path) as (_, one, two):
        for event in (WORKING, PART, DONE):
            await one.publish("t", VersionedEvent(event, TaskVersion.MISSING))
        assert await read(two) == [(event, TaskVersion.MISSING) for event in (WORKING, PART, DONE)]


async def test_versions_may_be_texts(tmp_path):
    async with task_streams(tmp_path) as (_, one, two):
        for version, event in (("2026-01-01", WORKING), ("2026-01-02", DONE)):
            await one.publish("t", VersionedEvent(event, TaskVersion(version)))
        assert await read(two, TaskVersion("2026-01-01")) == [(DONE, TaskVersion("2026-01-02"))]


@pytest.mark.parametrize("task_id", ["t", "2b9b5e64-219f-4fb4-ac1d-eccacab29b0a", "a/b c", "ö" * 500, "h-1"])
async def test_tasks_have_any_ids(tmp_path, task_id):
    async with task_streams(tmp_path) as (_, one, two):
        await published(one, PART, DONE, task_id="other")
        await published(one, DONE, task_id=task_id)
        await one.destroy(task_id)
        assert await read(two, task_id=task_id) == [(DONE, TaskVersion(1))]


async def test_a_subscriber_of_a_task_without_events_for_too_long_gets_an_error(tmp_path):
    async with task_streams(tmp_path, {"lite_expiry_interval_ms": 5000}, expire_after=60) as (_, one, two):
        await published(one, WORKING)
        reading = two.subscribe("t", after=TaskVersion.MISSING)
        assert (await anext(reading)).event == WORKING
        with pytest.raises(InternalError, match="task t: stream t has expired"):
            await anext(reading)


async def test_an_event_that_no_broker_stores_is_an_error_and_a_subscriber_waits_for_the_broker(tmp_path):
    async with task_streams(tmp_path) as (servers, one, two):
        await published(one, WORKING)
        reading = asyncio.create_task(read(two))
        await asyncio.sleep(1)
        await servers.stop_broker()
        with pytest.raises(RmqError):
            await published(one, PART, first=2)
        await servers.start_broker()
        await published(one, DONE, first=3)
        assert [event for event, _ in await reading] == [WORKING, DONE]


async def test_streams_that_are_not_open_refuse_to_publish_and_to_subscribe(tmp_path):
    async with task_streams(tmp_path) as (_, one, two):
        pass
    with pytest.raises(ClientError, match="not open"):
        await published(one, WORKING)
    with pytest.raises(ClientError, match="not open"):
        await read(two)


async def test_a_task_of_another_process_is_followed_and_cancelled(tmp_path):
    async with task_streams(tmp_path) as (_, *streams):
        store, card, context = InMemoryTaskStore(), agent_card("http://x/"), ServerCallContext()
        runs, other = [
            DefaultRequestHandler(Counter(tmp_path / "go"), store, card, event_stream=one) for one in streams
        ]
        answers = runs.on_message_send_stream(sent("count"), context)
        task = await anext(answers)
        following = other.on_subscribe_to_task(SubscribeToTaskRequest(id=task.id), context)
        snapshot = await anext(following)
        assert (snapshot.id, [type(await anext(following)) for _ in range(4)]) == (
            task.id,
            [Task, *[TaskArtifactUpdateEvent] * 3],
        )
        await other.on_cancel_task(CancelTaskRequest(id=task.id), context)
        assert [TaskState.Name(one.status.state) async for one in following] == ["TASK_STATE_CANCELED"]
        await answers.aclose()
        await runs.aclose()

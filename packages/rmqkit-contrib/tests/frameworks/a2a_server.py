"""The A2A agent of the tests. Arguments: port, folder, ``versions`` for a task store that counts versions.

The agent sends three parts of its answer and waits until a file exists. A further message of the task continues it: the
agent sends two parts and completes the task.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import uvicorn
from a2a.helpers.proto_helpers import new_task_from_user_message, new_text_part
from a2a.server.agent_execution import AgentExecutor, RequestContext
from a2a.server.cluster import VersionedDatabaseTaskStore
from a2a.server.events import EventQueue
from a2a.server.request_handlers import DefaultRequestHandler
from a2a.server.routes.jsonrpc_routes import create_jsonrpc_routes
from a2a.server.tasks import DatabaseTaskStore, TaskUpdater
from a2a.types.a2a_pb2 import AgentCapabilities, AgentCard, AgentInterface, AgentSkill
from sqlalchemy.ext.asyncio import create_async_engine
from starlette.applications import Starlette

import rmqkit
from rmqkit.a2a import TaskStreams


def agent_card(url: str) -> AgentCard:
    return AgentCard(
        name="counter",
        description="Counts",
        version="1",
        capabilities=AgentCapabilities(streaming=True),
        default_input_modes=["text/plain"],
        default_output_modes=["text/plain"],
        skills=[AgentSkill(id="count", name="count", description="counts", tags=["count"])],
        supported_interfaces=[AgentInterface(protocol_binding="JSONRPC", url=url, protocol_version="1.0")],
    )


class Counter(AgentExecutor):
    """Sends parts 0, 1 and 2, waits for ``go``; with the next message parts 3 and 4."""

    def __init__(self, go: Path) -> None:
        self._go = go

    async def execute(self, context: RequestContext, event_queue: EventQueue) -> None:
        task = context.current_task
        first = 0 if task is None else 3
        if task is None:
            task = new_task_from_user_message(context.message)
            task.id, task.context_id = context.task_id, context.context_id
            await event_queue.enqueue_event(task)
        updater = TaskUpdater(event_queue, task.id, task.context_id)
        for i in range(first, 3 if first == 0 else 5):
            await updater.add_artifact([new_text_part(f"part {i}")], artifact_id="answer", append=i > 0)
        if first == 0:
            while not self._go.exists():
                await asyncio.sleep(0.02)
        else:
            await updater.complete()

    async def cancel(self, context: RequestContext, event_queue: EventQueue) -> None:
        await TaskUpdater(event_queue, context.task_id, context.context_id).cancel()


if __name__ == "__main__":
    port, folder = int(sys.argv[1]), Path(sys.argv[2])
    engine = create_async_engine(f"sqlite+aiosqlite:///{folder}/tasks.db")
    store = VersionedDatabaseTaskStore(engine) if "versions" in sys.argv else DatabaseTaskStore(engine)
    streams = TaskStreams(rmqkit.streams.embedded(folder / "data", "Tasks", expire_after=3600))
    handler = DefaultRequestHandler(
        Counter(folder / "go"), store, agent_card(f"http://127.0.0.1:{port}/"), event_stream=streams
    )

    @asynccontextmanager
    async def lifespan(app: Starlette):
        await store.initialize()
        async with streams:
            yield

    uvicorn.run(
        Starlette(routes=create_jsonrpc_routes(handler, "/"), lifespan=lifespan),
        host="127.0.0.1",
        port=port,
        log_level="warning",
    )

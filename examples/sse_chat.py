"""A web service that streams an answer word by word. A browser that connects again continues where it was.

uvicorn --app-dir examples sse_chat:app
curl -N localhost:8000/chats/42                                     # the words, each with its id
curl -N localhost:8000/chats/42 -H 'Last-Event-ID: 1.2.chat-42'     # the words after this one
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Header, HTTPException
from fastapi.responses import StreamingResponse

import rmqkit

WORDS = "Streams outlive the connection that reads them".split()
streams = rmqkit.streams.embedded(os.environ.get("STREAMS", "data"), "Chats", expire_after=3600)
writing: set[asyncio.Task[None]] = set()


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with streams as app.state.streams:
        yield


app = FastAPI(lifespan=lifespan)


async def write(name: str) -> None:
    """Write the answer, as a language model would."""
    for word in WORDS:
        await app.state.streams.append(name, word)
        await asyncio.sleep(0.02)
    await app.state.streams.finish(name)


@app.get("/chats/{number}")
async def chat(number: int, last_event_id: str | None = Header(None)) -> StreamingResponse:
    name = f"chat-{number}"
    if last_event_id is None and await app.state.streams.last(name) is None:
        task = asyncio.create_task(write(name))
        writing.add(task)
        task.add_done_callback(writing.discard)
    try:
        events = app.state.streams.read(name, after=last_event_id)
    except rmqkit.EventIdIllegal as error:
        raise HTTPException(400, str(error)) from None

    async def body() -> AsyncIterator[str]:
        async for event in events:
            yield f"id: {event.id}\ndata: {event.text}\n\n"

    return StreamingResponse(body(), media_type="text/event-stream")

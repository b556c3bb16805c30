"""Answers that reach the browser word by word, also after a lost connection or a restart of the service.

uvicorn --app-dir examples sse_chat:app                            # then open http://localhost:8000
curl -X POST localhost:8000/answers/42                             # write an answer
curl -N localhost:8000/answers/42                                  # its words, each with its id
curl -N localhost:8000/answers/42 -H 'Last-Event-ID: 1.2.42'       # the words after this one
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.responses import HTMLResponse

import rmqkit
from rmqkit.sse import EventStreamResponse, ends_with_server

PAGE = """<!doctype html><button onclick="ask()">Ask</button> <p id="answer"></p><script>
function ask() {
  const name = Date.now(), answer = document.getElementById("answer")
  fetch("/answers/" + name, { method: "POST" })
  const words = new EventSource("/answers/" + name)
  words.onmessage = event => answer.append(event.data)
  words.addEventListener("end", () => words.close())
}</script>"""


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with rmqkit.streams.embedded("data", expire_after=3600) as app.state.streams, ends_with_server():
        yield


app = FastAPI(lifespan=lifespan)


@app.post("/answers/{name}")
async def write(name: str) -> None:
    for word in "Streams outlive the connection that reads them".split():  # in place of a language model
        await app.state.streams.append(name, f"{word} ")
        await asyncio.sleep(0.02)
    await app.state.streams.finish(name)


@app.get("/answers/{name}")
async def follow(name: str) -> EventStreamResponse:
    return EventStreamResponse(app.state.streams, name)


@app.get("/", response_class=HTMLResponse)
async def page() -> str:
    return PAGE

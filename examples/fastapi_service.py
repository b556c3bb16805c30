"""A web service that sends and consumes in its own event loop.

    NAMESRV_ADDR=127.0.0.1:9876 uvicorn --app-dir examples fastapi_service:app
    curl -X POST localhost:8000/orders -H 'content-type: application/json' -d '{"item": "book"}'

``python examples/fastapi_service.py [HOST:PORT of a name server]`` serves, orders twice, and ends.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
from fastapi import FastAPI, HTTPException
from pydantic import BaseModel

from rmqkit import Producer, PushConsumer, ReceivedMessage, RmqError

if __name__ == "__main__" and len(sys.argv) > 1:
    os.environ["NAMESRV_ADDR"] = sys.argv[1]

ITEMS = ("book", "lamp")
producer = Producer("web-shop")
consumer = PushConsumer("web-shop-billing")
billed: list[str] = []
all_billed = asyncio.Event()


class Order(BaseModel):
    item: str


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with producer, consumer:
        yield


app = FastAPI(lifespan=lifespan)


@consumer.on("WebOrders")
async def bill(message: ReceivedMessage) -> None:
    billed.append(message.body.decode())
    if len(billed) == len(ITEMS):
        all_billed.set()


@app.post("/orders", status_code=202)
async def order(order: Order) -> dict[str, str | None]:
    try:
        result = await producer.send("WebOrders", order.item.encode())
    except RmqError as error:
        raise HTTPException(503, str(error)) from None
    return {"message": result.msg_id}


@app.get("/billed")
async def what_was_billed() -> list[str]:
    return sorted(billed)


async def try_it() -> None:
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning"))
    serving = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
        await asyncio.sleep(0.01)
    url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    for item in ITEMS:
        body = json.dumps({"item": item}).encode()
        request = urllib.request.Request(f"{url}/orders", body, {"content-type": "application/json"})
        await asyncio.to_thread(urllib.request.urlopen, request)
    await asyncio.wait_for(all_billed.wait(), 30)
    print((await asyncio.to_thread(urllib.request.urlopen, f"{url}/billed")).read().decode())
    server.should_exit = True
    await serving


if __name__ == "__main__":
    asyncio.run(try_it())

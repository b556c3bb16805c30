"""The console's port: connections that send nothing keep nobody out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from rmqkit.clock import SYSTEM_CLOCK
from rmqkit.console import Console
from rmqkit.console.access.audit import Audit
from rmqkit.console.server import serve
from tests.waiting import SECONDS

GET = b"GET /login HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"

Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def port() -> AsyncIterator[int]:
    """A console of nobody's cluster; its port."""
    until, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
    task = asyncio.create_task(serve.serve(Console("127.0.0.1:1"), "127.0.0.1", 0, ready=ready.set_result, until=until))
    try:
        yield int((await ready).rstrip("/").rpartition(":")[2])
    finally:
        until.set()
        await task


async def asked(number: int, content: bytes = GET) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", number)
    writer.write(content)
    answer = await asyncio.wait_for(reader.read(), SECONDS)
    writer.close()
    return answer


async def opened(number: int, count: int, content: bytes) -> list[Ends]:
    found = []
    for _ in range(count):
        reader, writer = await asyncio.open_connection("127.0.0.1", number)
        writer.write(content)
        found.append((reader, writer))
    return found


HALVES = {
    "nothing": b"",
    "half a head": GET[:30],
    "half a body": b"POST /login HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\n\r\nname=",
    "a whole request, then nothing": GET.replace(b"Connection: close\r\n", b""),
}


@pytest.mark.real_time
@pytest.mark.parametrize("content", HALVES.values(), ids=HALVES)
async def test_connections_that_wait_keep_nobody_out(content: bytes) -> None:
    async with port() as number:
        waiting = await opened(number, serve.CONCURRENCY_MAX + 20, content)
        assert (await asked(number)).startswith(b"HTTP/1.1 ") and b" 503 " not in await asked(number)
        for _, writer in waiting:
            writer.close()


@pytest.mark.real_time
@pytest.mark.parametrize("name", ["nothing", "half a head", "half a body"])
async def test_a_connection_that_owes_a_request_is_closed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "WAIT_SECONDS", 0.05)
    async with port() as number:
        ((reader, writer),) = await opened(number, 1, HALVES[name])
        try:
            assert b"200 OK" not in await asyncio.wait_for(reader.read(), SECONDS)
        except ConnectionError:
            pass
        writer.close()


def test_audit_files_are_for_their_owner_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rmqkit.console.access.audit.FILE_BYTES", 200)
    path = tmp_path / "audit.jsonl"
    for old in (path, path.with_name("audit.jsonl.1")):
        old.write_text("")
        old.chmod(0o644)
    audit = Audit(path, SYSTEM_CLOCK)
    for number in range(10):
        audit.write("anna", "10.0.0.1", "", "send", f"T{number}", "done")
    audit.close()
    files = sorted(tmp_path.glob("audit.jsonl*"))
    assert len(files) > 2
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}

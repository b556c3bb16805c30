"""h2spec, the conformance test of HTTP/2: 145 requests and faults at our connections.

It sends GET and expects a page, so it runs against streams that answer every request with a few bytes. The handling of
requests by gRPC has other tests (packages/rmqkit-server/tests/proxy/test_grpc_call.py).
"""

from __future__ import annotations

import asyncio
import re
import tempfile
from pathlib import Path

import pytest

from rmqkit.proxy.transport.header_blocks import header_block
from rmqkit.proxy.transport.http2 import Http2Connection
from rmqkit.proxy.transport.stream import Http2Stream
from rmqkit.remoting.router import Router
from rmqkit.remoting.server import RemotingServer
from tests.interop.go_and_node import BUILD_SECONDS, GO_BUILD, GO_ENV, cached, complete, fetch, find_tool
from tests.interop.kit import Unavailable, move_into_place

HERE = Path(__file__).with_name("h2spec")
SECONDS = 120

# h2spec waits in real time for frames that a server does not send.
pytestmark = pytest.mark.real_time


class Page(Http2Stream):
    """A stream that reads a request and answers with a page."""

    __slots__ = ()

    def received(self, data: bytes) -> None:
        self.take(len(data))

    def ended(self) -> None:
        self.write_answer(header_block([(b":status", b"200")]), b"hello, h2spec", header_block([(b"x-end", b"1")]))


def prepare_h2spec() -> Path:
    """Return the program pinned by ``h2spec/go.sum``. Raises Unavailable."""
    program = cached("h2spec", sorted(HERE.glob("go.*")))
    if not program.exists():
        go = find_tool("go")
        fetch([go, "mod", "download"], HERE, GO_ENV)
        with tempfile.TemporaryDirectory(dir=program.parent, prefix="building-") as built:
            command = [go, *GO_BUILD, "-o", f"{built}/program", "github.com/summerwind/h2spec/cmd/h2spec"]
            done = complete(command, HERE, GO_ENV, BUILD_SECONDS)
            assert done.returncode == 0, f"go build failed in {HERE}:\n{done.stderr}"
            move_into_place(Path(built, "program"), program)
    return program


async def test_every_case_passes():
    try:
        program = await asyncio.to_thread(prepare_h2spec)
    except Unavailable as reason:
        pytest.skip(str(reason))
    server = RemotingServer(Router())
    server.http2 = lambda **link: Http2Connection(Page, **link)
    port = await server.listen("127.0.0.1", 0)
    command = [str(program), "-h", "127.0.0.1", "-p", str(port), "-o", "10"]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    output, _ = await asyncio.wait_for(process.communicate(), SECONDS)
    await server.close()
    told = output.decode()
    counts = re.search(r"(\d+) tests, (\d+) passed, (\d+) skipped, (\d+) failed", told)
    assert counts is not None, told
    assert counts.groups() == ("145", "145", "0", "0"), told[told.find("Failures") :]

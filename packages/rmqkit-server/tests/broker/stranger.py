"""A client made of `struct`, `json` and `hmac` alone: it shares no code with the servers that it calls."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import re
import struct


class Answer:
    """A server's answer. ``fields`` are its extFields."""

    def __init__(self, header: dict, body: bytes) -> None:
        self.code = header["code"]
        self.remark = header.get("remark") or ""
        self.fields = header.get("extFields") or {}
        self.body = body

    @property
    def table(self) -> dict:
        """The body as JSON; Java's dialect writes numbers as names without quotes."""
        return json.loads(re.sub(rb"([{,])(\d+):", rb'\1"\2":', self.body))


def signed(fields: dict[str, str], body: bytes, user: str, secret: str) -> dict[str, str]:
    """Return the fields with the name and the signature of a user, as Apache's clients send them."""
    fields = {**fields, "AccessKey": user}
    data = "".join(fields[name] for name in sorted(fields)).encode() + body
    return {**fields, "Signature": base64.b64encode(hmac.new(secret.encode(), data, hashlib.sha1).digest()).decode()}


def fully_signed(code: int, fields: dict[str, str], body: bytes, user: str, secret: str, said: str) -> dict[str, str]:
    """Return the fields with both signatures. ``said``: the time in ms, a session and a number."""
    fields = {**fields, "AccessKey": user, "RmqSigned": said}
    data = b"rmqkit request 1" + struct.pack(">i", code)
    for name in sorted(fields):
        for text in (name.encode(), fields[name].encode()):
            data += struct.pack(">i", len(text)) + text
    full = hmac.new(secret.encode(), data + struct.pack(">i", -1) + body, hashlib.sha256).digest()
    return signed({**fields, "RmqSignature": base64.b64encode(full).decode()}, body, user, secret)


def frame(code: int, fields: dict[str, str], body: bytes = b"", opaque: int = 1) -> bytes:
    """Return the bytes of a request on the wire."""
    header = {"code": code, "language": "OTHER", "version": 0, "opaque": opaque, "flag": 0, "extFields": fields}
    encoded = json.dumps(header).encode()
    return struct.pack(">ii", 4 + len(encoded) + len(body), len(encoded)) + encoded + body


class Stranger:
    """One connection; ``preamble`` are bytes that it sends first."""

    def __init__(self, address: str, preamble: bytes = b"", source: str | None = None) -> None:
        self._address = address
        self._preamble = preamble
        self._source = source

    async def __aenter__(self) -> Stranger:
        host, port = self._address.rsplit(":", 1)
        local = None if self._source is None else (self._source, 0)
        self._reader, self._writer = await asyncio.open_connection(host, port, local_addr=local)
        self._writer.write(self._preamble)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._writer.close()

    async def ask(self, code: int, body: bytes = b"", user: str | None = None, **fields: str) -> Answer:
        """Send one request, signed if a user is named, and return its answer."""
        return await self.ask_bytes(frame(code, signed(fields, body, user, "secret12") if user else fields, body))

    async def ask_bytes(self, sent: bytes) -> Answer:
        self._writer.write(sent)
        header, body = await self._next()
        return Answer(header, body)

    async def next_request(self) -> tuple[int, bytes]:
        """Return the code and the body of the server's next request over this connection."""
        header, body = await self._next()
        assert not header["flag"] & 1, "it is no answer"
        return header["code"], body

    async def _next(self) -> tuple[dict, bytes]:
        size, header_size = struct.unpack(">ii", await self._reader.readexactly(8))
        rest = await self._reader.readexactly(size - 4)
        header_size &= 0xFFFFFF
        return json.loads(rest[:header_size]), rest[header_size:]


async def ask(address: str, code: int, body: bytes = b"", user: str | None = None, **fields: str) -> Answer:
    """Send one request over a connection of its own, and return its answer."""
    async with Stranger(address) as stranger:
        return await stranger.ask(code, body, user, **fields)

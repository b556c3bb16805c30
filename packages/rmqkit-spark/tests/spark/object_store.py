"""An object store on loopback over a directory: the part of S3's HTTP that listing, reading and writing need.

``GET /bucket?list-type=2&prefix=..&delimiter=..``, ``GET`` with ``Range`` and ``HEAD`` of an object, ``PUT`` of an
object, whole or in parts. Only requests signed with the store's one access key may read. A page of a listing has few
keys. The store counts the bytes read.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import BinaryIO
from urllib.parse import parse_qs, quote, unquote, urlsplit
from xml.sax.saxutils import escape

__all__ = ["ACCESS_KEY", "SECRET_KEY", "ObjectStore", "serve_objects"]

ACCESS_KEY = "AKTESTS"
SECRET_KEY = "s3cr3t/with+signs"
_KEYS_OF_PAGE = 20


class ObjectStore(ThreadingHTTPServer):
    """One bucket, ``data``, whose objects are the files below a directory."""

    daemon_threads = True

    def __init__(self, root: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.root = root
        self.reads: list[tuple[str, int]] = []
        self.tokens: set[str] = set()

    def address(self, below: str, *, user: str = f"{ACCESS_KEY}:{quote(SECRET_KEY, safe='')}@") -> str:
        """The address of a directory."""
        return f"s3://{user}data/{below}?endpoint_override=127.0.0.1:{self.server_port}&scheme=http"

    def read_bytes(self, name: str) -> int:
        """Return the number of bytes read of the objects whose key ends with a name."""
        return sum(size for key, size in self.reads if key.endswith(name))


@contextmanager
def serve_objects(root: Path) -> Iterator[ObjectStore]:
    """Serve until the end of the block."""
    with ObjectStore(root) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16  # head and body in one packet
    server: ObjectStore

    def handle_expect_100(self) -> bool:
        is_answered = super().handle_expect_100()
        self.wfile.flush()  # or the client waits a second for it
        return is_answered

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        _, bucket, *key = unquote(url.path).split("/", 2)
        if token := self.headers.get("X-Amz-Security-Token"):
            self.server.tokens.add(token)
        path = self.server.root / "/".join(key)
        if f"Credential={ACCESS_KEY}/" not in self.headers.get("Authorization", ""):
            self.answer(403, error("AccessDenied"))
        elif bucket != "data":
            self.answer(404, error("NoSuchBucket"))
        elif "list-type" in url.query:
            self.answer(200, self._page({name: values[0] for name, values in parse_qs(url.query).items()}))
        elif not "".join(key):
            self.answer(200)
        elif path.is_file() and not url.path.endswith("/"):
            self._object("/".join(key), path)
        else:
            self.answer(404, error("NoSuchKey"))

    def do_PUT(self) -> None:
        content = b"".join(self._content())
        url = urlsplit(self.path)
        path = self.server.root.joinpath(*unquote(url.path).split("/")[2:])
        number = parse_qs(url.query).get("partNumber")
        path.parent.mkdir(parents=True, exist_ok=True)
        (path if number is None else path.with_name(f"{path.name}.part{int(number[0]):05d}")).write_bytes(content)
        self.answer(200, headers={"ETag": '"0"'})

    def _content(self) -> Iterator[bytes]:
        """The body, without the chunks in which the SDK sends it, each with a signature or none."""
        if "aws-chunked" not in self.headers.get("Content-Encoding", ""):
            yield self.rfile.read(int(self.headers["Content-Length"]))
            return
        body = self.rfile
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = io.BytesIO(b"".join(iter(lambda: _chunk(self.rfile), b"")))
        yield from iter(lambda: _chunk(body), b"")

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        url = urlsplit(self.path)
        path = self.server.root.joinpath(*unquote(url.path).split("/")[2:])
        if "uploadId" not in parse_qs(url.query):
            self.answer(200, b"<InitiateMultipartUploadResult><UploadId>1</UploadId></InitiateMultipartUploadResult>")
            return
        with path.open("wb") as whole:
            for part in sorted(path.parent.glob(f"{path.name}.part*")):
                whole.write(part.read_bytes())
                part.unlink()
        self.answer(200, b"<CompleteMultipartUploadResult><ETag>0</ETag></CompleteMultipartUploadResult>")

    def _object(self, key: str, path: Path) -> None:
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        size = path.stat().st_size
        low, high = (int(asked[1]), min(int(asked[2]) + 1, size)) if asked else (0, size)
        if self.command == "HEAD":
            self.answer(200, headers={"Content-Length": str(size)})
            return
        with path.open("rb") as file:
            file.seek(low)
            content = file.read(high - low)
        self.server.reads.append((key, len(content)))
        self.answer(206 if asked else 200, content, {"Content-Range": f"bytes {low}-{high - 1}/{size}"})

    def _page(self, asked: dict[str, str]) -> bytes:
        prefix, delimiter = asked.get("prefix", ""), asked.get("delimiter", "")
        files = (path for path in self.server.root.rglob("*") if path.is_file())
        keys = {path.relative_to(self.server.root).as_posix(): path.stat().st_size for path in files}
        found: dict[str, int | None] = {}
        for key, size in sorted(keys.items()):
            if key.startswith(prefix):
                ahead, stop, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key[len(prefix) :], "", "")
                found[prefix + ahead + stop] = None if stop else size
        rest = [name for name in found if name > asked.get("continuation-token", "")]
        page = rest[: min(_KEYS_OF_PAGE, int(asked.get("max-keys", "1000")))]
        told = "".join(
            f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>"
            if found[name] is None
            else f"<Contents><Key>{escape(name)}</Key><LastModified>2026-01-02T03:04:05.000Z</LastModified>"
            f"<ETag>&quot;0&quot;</ETag><Size>{found[name]}</Size></Contents>"
            for name in page
        )
        more = len(page) < len(rest)
        token = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if more else ""
        return (
            f"<ListBucketResult><Name>data</Name><Prefix>{escape(prefix)}</Prefix><KeyCount>{len(page)}</KeyCount>"
            f"<IsTruncated>{str(more).lower()}</IsTruncated>{token}{told}</ListBucketResult>"
        ).encode()

    def answer(self, status: int, content: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """No line for every request."""


def error(code: str) -> bytes:
    return f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()


def _chunk(body: BinaryIO) -> bytes:
    """The next chunk of a body; nothing when it was the last one, behind which lines of a trailer may follow."""
    size = int(body.readline().partition(b";")[0], 16)
    if size:
        content = body.read(size)
        body.readline()
        return content
    while body.readline().strip():
        pass
    return b""

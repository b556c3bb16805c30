"""A broker with an object store that refuses requests or lies: only files that the store really has are deleted."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rmqkit.errors import StoreError
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.schemas.offsets import QueueRequest
from tests.broker.test_archive import Archived, beside
from tests.spark import object_store

__all__ = ["beside"]

pytest.importorskip("pyarrow.fs", reason="an object store as an archive needs rmqkit[arrow]")


class Failing(object_store.Handler):
    """An object store that fails requests of a kind as the test sets it."""

    def do_PUT(self) -> None:  # noqa: N802 - the base class's name
        self._or(super().do_PUT)

    def do_GET(self) -> None:  # noqa: N802 - the base class's name
        self._or(super().do_GET)

    def _or(self, answer) -> None:
        fault = self.server.faults.get(self.command)
        if fault is None:
            return answer()
        if self.command == "PUT":
            b"".join(self._content())  # the rest of the body would be read as the next request
        return fault(self)


def refuse(handler) -> None:
    handler.answer(403, object_store.error("AccessDenied"))


def lie(handler) -> None:
    handler.answer(200, headers={"ETag": '"0"'})


@pytest.fixture
def objects(tmp_path) -> Iterator[object_store.ObjectStore]:
    (tmp_path / "objects" / "archive").mkdir(parents=True)
    with object_store.serve_objects(tmp_path / "objects") as server:
        server.faults = {}
        server.RequestHandlerClass = Failing
        yield server


def archived(tmp_path, objects) -> Archived:
    return Archived(tmp_path, store={"archive": objects.address("archive")})


@pytest.mark.real_time
async def test_nothing_is_deleted_that_an_object_store_did_not_confirm(tmp_path, objects):
    async with archived(tmp_path, objects) as broker:
        await broker.fill(20)
        await broker.archive_all()
        for method, fault in (("PUT", refuse), ("PUT", lie), ("GET", refuse)):
            await broker.fill(20)
            objects.faults[method] = fault
            before = broker.context.archive.archived_to
            with pytest.raises((StoreError, OSError)):
                await broker.archive_full()
            broker.delete_old()
            assert broker.context.archive.archived_to == before == broker.store.min_physical_offset
            objects.faults.clear()
            await broker.archive_all()
            assert broker.store.min_physical_offset > before
        assert await broker.read(0, 80) == list(range(20)) * 4


@pytest.mark.real_time
async def test_a_consumer_keeps_its_place_while_an_object_store_is_away(tmp_path, objects):
    async with archived(tmp_path, objects) as broker:
        await broker.fill()
        await broker.archive_all()
        objects.faults["GET"] = refuse
        assert (await broker.pull(0)).code == ResponseCode.SYSTEM_BUSY
        objects.faults.clear()
        assert await broker.read(0, 50) == list(range(50))
    objects.faults["GET"] = refuse
    async with archived(tmp_path, objects) as broker:
        assert (await broker.pull(0)).code == ResponseCode.SYSTEM_BUSY
        answer = await broker.call(RequestCode.GET_MIN_OFFSET, QueueRequest("T", 0))
        assert answer.code == ResponseCode.SYSTEM_BUSY
        assert "s3cr3t" not in answer.remark
        objects.faults.clear()
        await broker.context.archive.round()
        assert await broker.number(RequestCode.GET_MIN_OFFSET, QueueRequest("T", 0)) == 0
        assert await broker.read(0, 50) == list(range(50))

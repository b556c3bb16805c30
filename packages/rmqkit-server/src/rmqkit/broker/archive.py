"""The archive of a broker's log: it stores old files, and serves consumers that read far back.

With ``archive=PATH`` (or an address, `rmqkit.store.archive.places`) a master writes every full file of its log as a
segment below ``PATH/brokerName``, when the file is on the disk and dispatched. Retention then deletes a log file only
after its segment was written, read back and compared, even if the disk is full. If the archive cannot be reached, the
disk fills and puts are refused, but nothing is lost. Segments are written one after the other, in a separate process
(`rmqkit.store.archive.seal`). A slave writes no segments, and deletes no file that its master has not archived.

`READS_AT_ONCE` threads read the segments for pulls from before the log and for queries of deleted messages. The loop
never waits for the threads. At most `READS_OF_SEGMENT` threads read one segment, and the same number of threads answer
queries. So an object that loads slowly delays only its own readers. The number of waiting reads is limited, too:
`READS_MAX` in all, `READS_OF_CONNECTION` for a connection, `WAITING_OF_SEGMENT` for a segment. A request above these
limits gets an answer that makes the client retry. A read holds memory only until the loop has handled its result.

For clients a queue begins at the first archived message. Handlers use the archive as
`rmqkit.broker.older.OlderMessages`: a read returns the missing messages, and is repeated after they were fetched. After
a start, and while the archive cannot be read, the broker does not know the archived messages. Clients that request
messages from before the log then have to retry: if they moved to the start of the log, they would miss all archived
messages.

Segments can be deleted while the broker runs. `rmqkit.store.archive.archive` describes the reads in this case. A master
lists the segments again every `LIST_SECONDS`, and a slave lists them every `ROUND_SECONDS`.

With ``archiveCatalog=`` the process that writes a segment also adds it to an Iceberg table
(`rmqkit.store.archive.catalog`). A failure of the catalog is logged once and retried in each round. It delays neither
segments nor retention.
"""

from __future__ import annotations

import asyncio
import logging
import shlex
import sys
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

import msgspec

from rmqkit.errors import PeerRefused, StoreError
from rmqkit.protocol.codes import ResponseCode
from rmqkit.protocol.properties import encoded_tags_code
from rmqkit.remoting.connection import WRITE_BYTES_HIGH, Connection
from rmqkit.remoting.router import OVERLOADED
from rmqkit.store.archive.archive import Archive
from rmqkit.store.archive.identity import LogIdentity
from rmqkit.store.archive.places import place_of
from rmqkit.store.archive.seal import Sealed, Work
from rmqkit.store.message_store import GetResult, MessageStore
from rmqkit.store.settings import StoreSettings
from rmqkit.system import threads

__all__ = ["ROUND_SECONDS", "LogArchive"]

ROUND_SECONDS = 10.0
"""The time between two calls of `LogArchive.round`. In each call, a master searches for log files to archive, and a
slave searches for segments of its master."""

LIST_SECONDS = 600.0
"""The time between two listings of a master's segments. The log file of a deleted segment is archived again."""

READS_AT_ONCE = 16
READS_OF_SEGMENT = 4
READS_MAX = 512
READS_OF_CONNECTION = 32
WAITING_OF_SEGMENT = 128
_LOOKED_UP = ""
"""The name under which searches for a key, a time or a record are limited. Before such a search, its segments are not
known."""

_log = logging.getLogger(__name__)

T = TypeVar("T")


class _Turns:
    """The limit and the number of reads of one segment."""

    def __init__(self) -> None:
        self.semaphore = asyncio.Semaphore(READS_OF_SEGMENT)
        self.count = 0


class LogArchive:
    """The archive of one broker. Use it only on the event loop.

    Attributes:
        process: the process that writes a segment, or None.
        needs: functions that return the physical offset from which a part of the broker reads the log, or None.

    Args:
        writes: True if segments are written; False at a slave.

    Raises:
        ExtraMissing, StoreError: ``archive`` is neither a path nor an address.
    """

    def __init__(self, store: MessageStore, settings: StoreSettings, broker_name: str, *, writes: bool) -> None:
        self._store = store
        self._settings = settings
        self._below = broker_name
        self._writes = writes
        self._identity = LogIdentity(store.root, self._first_record, makes=writes)
        self._archive = Archive(place_of(settings.archive, broker_name), self._identity)
        self._rounds_to_list = 0
        self._changes = 0
        self._gaps: set[tuple[int, int]] = set()
        self._threads = threads.Pool(READS_AT_ONCE + 1, "archive")  # one more thread for `round`
        self._turns = asyncio.Semaphore(READS_AT_ONCE)
        self._turns_of: dict[str, _Turns] = {}
        self._reads: Counter[Connection] = Counter()
        self._is_known = False
        self._unreadable = ""
        self._catalog_error = ""
        self._lacks_segments = bool(settings.archive_catalog)
        self.process: asyncio.subprocess.Process | None = None
        self._is_stopping = False
        self._round = asyncio.Lock()
        self.needs: list[Callable[[], int | None]] = []

    # ---- the log's files

    @property
    def kept_from(self) -> int:
        """The physical offset from which retention must keep the log. Earlier data is archived and contains no delayed,
        timed and half messages that still wait, because these are read only from the log."""
        return min([self.archived_to, *(offset for need in self.needs if (offset := need()) is not None)])

    @property
    def archived_to(self) -> int:
        """The physical offset up to which the log is archived."""
        # Return 0 while the segments are not known, so that retention keeps all files.
        return self._archive.covered(self._store.min_physical_offset) if self._is_known else 0

    async def round(self) -> None:
        """List the segments, and write segments of full files. Retention keeps a file until its segment is written.
        Raises StoreError, OSError: the archive cannot be reached, or belongs to another log. The next call retries."""
        async with self._round:
            self._unreadable = ""
            await self._work()

    async def _work(self) -> None:
        await self._look()
        while self._writes and not self._is_stopping and (work := self._next()) is not None:
            await self._seal(work)
        if self._writes and not self._is_stopping and self._lacks_segments and self._archive.segment_count:
            # The catalog failed, or the broker has started: it may have died between a segment and its commit.
            self._committed(await self._sealed(self._work_on("", 0)))

    def stop(self) -> None:
        """Stop writing segments, and kill the process that writes one. Readers ignore the partial segment. The broker
        writes this segment again after its next start."""
        self._is_stopping = True
        if self.process is not None:
            self.process.kill()

    async def _look(self) -> None:
        if self._is_known and self._writes and self._rounds_to_list > 0:
            self._rounds_to_list -= 1  # do not list each time: only this broker writes segments
            return
        await self._in_thread(self._archive.refresh)
        log_end = self._store.max_physical_offset
        await self._in_thread(lambda: self._archive.check(self._first_record, log_end))
        if not self._is_known:
            _log.info("archive %s: %d segments", self._archive.place, self._archive.segment_count)
        self._is_known = True
        self._rounds_to_list = round(LIST_SECONDS / ROUND_SECONDS)
        self._log_gaps()

    def _log_gaps(self) -> None:
        """Log the parts of the log that are missing because segments were deleted."""
        if self._changes == self._archive.changes and self._changes:
            return
        self._changes = self._archive.changes
        gaps = set(self._archive.gaps(self._store.min_physical_offset, self._identity.reached))
        for start, end in sorted(gaps - self._gaps):
            said = (
                "archive %s has no segment with the log from %d to %d, and the log begins at %d: consumers are moved "
                "past these messages; bring the segments back, or run: rmq archive verify %s --repair-from %s"
            )
            place, root = shlex.quote(str(self._archive.place)), shlex.quote(str(self._store.root))
            _log.error(said, self._archive.place, start, end, self._store.min_physical_offset, place, root)
        self._gaps = gaps

    def _first_record(self, start: int) -> bytes | None:
        record = self._store.log.record_at(start)
        return None if record is None else bytes(record)

    def _next(self) -> Work | None:
        """Return the work for the oldest full file that is not archived, or None."""
        start, store = self.archived_to, self._store
        # The file must be on the disk: a segment must not contain data that the log loses in a crash. The file must be
        # dispatched: it must not be deleted before its queue entries exist.
        ready = min(store.durable_offset, store.dispatched_offset)
        # Skip the last file, which is still being written.
        file = next((one for one in store.log.queue.files[:-1] if one.start == start and one.end <= ready), None)
        if file is None:
            return None
        return self._work_on(str(file.path), start)

    def _work_on(self, path: str, start: int) -> Work:
        settings = self._settings
        table = settings.archive_table or f"rmqkit.{self._below}"
        log_id, catalog = self._identity.log, settings.archive_catalog
        return Work(path, start, settings.archive, self._below, settings.index_tags, log_id, catalog, table)

    async def _seal(self, work: Work) -> None:
        """Write one segment. Raises StoreError: the segment could not be written."""
        sealed = await self._sealed(work)
        # `stop` may have killed the process. Then the partial segment is not an error.
        if self._is_stopping:
            return
        if sealed.error:
            raise StoreError(f"{work.path} is not archived, and not deleted until then: {sealed.error}")
        await self._in_thread(lambda: self._archive.add(sealed.name, sealed.size))
        await self._in_thread(lambda: self._identity.archived(self.archived_to))
        _log.info("%s is archived as %s: %d records in %d bytes", work.path, sealed.name, sealed.records, sealed.size)
        if sealed.other_bytes:
            said = (
                "%s has %d bytes that are not a record: they are in its segment; to see them, run: rmq store verify %s"
            )
            _log.warning(said, work.path, sealed.other_bytes, shlex.quote(str(self._store.root)))
        self._committed(sealed)

    async def _sealed(self, work: Work) -> Sealed:
        written = await self._writing(msgspec.json.encode(work) + b"\n")
        try:
            return msgspec.json.decode(written, type=Sealed)
        except msgspec.DecodeError:
            return Sealed(error="the process that should write it died")

    def _committed(self, sealed: Sealed) -> None:
        """Log an error of the catalog, once until the catalog accepts the segments. The next `round` retries."""
        if self._is_stopping or not self._settings.archive_catalog:
            return
        error = sealed.catalog_error or sealed.error
        self._lacks_segments = bool(error)
        if error and error != self._catalog_error:
            said = "archive %s: the catalog lacks segments and is asked again every %.0f s; check archiveCatalog: %s"
            _log.error(said, self._archive.place, ROUND_SECONDS, error)
        self._catalog_error = error

    async def _writing(self, line: bytes) -> bytes:
        """Run the work in a separate process. Return the line that the process prints; empty if the process died."""
        pipe = asyncio.subprocess.PIPE
        process = self.process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "rmqkit.store.archive.seal"), stdin=pipe, stdout=pipe
        )
        try:
            return (await process.communicate(line))[0]
        finally:
            self.process = None

    def close(self) -> None:
        """Stop the threads after their running reads."""
        self._threads.shutdown(cancel_futures=True)

    # ---- reading

    def min_offset(self, topic: str, queue_id: int) -> int:
        """Return the offset of the first message of a queue that can be pulled, from the log or the known archive."""
        return self._archive.min_offset(topic, queue_id, self._store.min_offset(topic, queue_id))

    def first_offset(self, topic: str, queue_id: int) -> int:
        """Return the offset of a queue's first message, for groups that begin at this message.
        Raises PeerRefused: the archive is not known yet."""
        if self._store.min_offset(topic, queue_id) > 0:
            self._need()
        return self.min_offset(topic, queue_id)

    def has(self, topic: str, queue_id: int, queue_offset: int) -> bool:
        """Return True if the archive has, or may have, a message that is not in the log, or a later message. The result
        is also True for an offset before the first archived message: `get` then returns the offset of this message."""
        if queue_offset >= self._store.max_offset(topic, queue_id):
            return False  # archived messages with this offset belong to a deleted topic of the same name
        return not self._is_known or self._archive.has(topic, queue_id, queue_offset)

    def _need(self) -> None:
        if not self._is_known:
            remark = f"the archive {self._archive.place} is not known yet: ask again"
            raise PeerRefused(ResponseCode.SYSTEM_BUSY, remark, str(self._archive.place))

    async def get(
        self,
        connection: Connection | None,
        topic: str,
        queue_id: int,
        queue_offset: int,
        *,
        count_max: int,
        codes: frozenset[int] | None = None,
        accept: Callable[[memoryview], bool] | None = None,
    ) -> GetResult:
        """Read a queue from an offset on. Raises PeerRefused: the client has to retry. Raises StoreError, OSError: the
        messages cannot be read."""
        self._need()
        bytes_max = self._settings.transfer_bytes_in_memory_max

        def read() -> GetResult:
            return self._archive.get(
                topic,
                queue_id,
                queue_offset,
                count_max=max(1, count_max),
                bytes_max=bytes_max,
                codes=codes,
                accept=accept,
                tags_code=encoded_tags_code,
            )

        segment = self._archive.segment_of(topic, queue_id, queue_offset)
        found = await self._read(connection, segment, read)
        found.min_offset = self.min_offset(topic, queue_id)
        found.max_offset = self._store.max_offset(topic, queue_id)
        return found

    async def record_at(self, connection: Connection, physical_offset: int) -> memoryview | None:
        """Return the record at a physical offset, or None. Raises the same errors as `get`."""
        if physical_offset < self._store.min_physical_offset:
            self._need()
        try:
            return await self._read(connection, _LOOKED_UP, lambda: self._archive.record_at(physical_offset))
        except StoreError as error:
            _log.error("archive %s: the record at %d cannot be read: %s", self._archive.place, physical_offset, error)
            remark = f"the record at {physical_offset} cannot be read from the archive: {error}"
            raise PeerRefused(ResponseCode.SYSTEM_ERROR, remark, str(self._archive.place)) from None

    async def query(
        self,
        connection: Connection,
        topic: str,
        key: str,
        count_max: int,
        begin_ms: int,
        end_ms: int,
        *,
        bytes_max: int,
    ) -> list[memoryview]:
        """Return the records with a key that were stored between two times (`Archive.query`). Raises the same errors as
        `get`."""
        return await self._read(
            connection,
            _LOOKED_UP,
            lambda: self._archive.query(topic, key, count_max, begin_ms, end_ms, bytes_max=bytes_max),
        )

    async def offset_by_time(self, connection: Connection, topic: str, queue_id: int, timestamp_ms: int) -> int | None:
        """Return the offset of the first message stored at or after a time, or None. Raises the same errors as
        `get`."""
        if self._store.min_offset(topic, queue_id) > 0:
            self._need()
        return await self._read(
            connection, _LOOKED_UP, lambda: self._archive.offset_by_time(topic, queue_id, timestamp_ms)
        )

    async def _read(self, connection: Connection | None, segment: str, read: Callable[[], T]) -> T:
        """Read a segment, or search, within the limits. ``connection``: None for the broker itself, which makes only
        one read at a time."""
        turns = self._turns_of.get(segment) or self._turns_of.setdefault(segment, _Turns())
        if connection is not None:
            if (
                self._reads.total() >= READS_MAX
                or self._reads[connection] >= READS_OF_CONNECTION
                or turns.count >= WAITING_OF_SEGMENT
            ):
                raise self._overloaded()
            self._reads[connection] += 1
        turns.count += 1
        try:
            # Acquire the segment's semaphore first: reads that wait for a slow object must not occupy threads.
            async with turns.semaphore, self._turns:
                # Refuse the read if the peer does not read its answers: they would only fill memory.
                if connection is not None and (connection.closed.done() or connection.unsent_bytes >= WRITE_BYTES_HIGH):
                    raise self._overloaded()
                found = await self._in_thread(read)
                self._log_gaps()
                return found
        except OSError as error:
            self._log_unreadable(error)
            remark = f"the archive {self._archive.place} cannot be read now: ask again"
            raise PeerRefused(ResponseCode.SYSTEM_BUSY, remark, str(self._archive.place)) from None
        finally:
            turns.count -= 1
            if not turns.count:
                del self._turns_of[segment]
            if connection is not None:
                self._reads[connection] -= 1
                if not self._reads[connection]:
                    del self._reads[connection]

    def _log_unreadable(self, error: OSError) -> None:
        """Log the reason why the archive cannot be read, once per call of `round`, because many consumers may request
        reads."""
        if str(error) != self._unreadable:
            self._unreadable = str(error)
            _log.error("archive %s cannot be read, consumers of archived messages wait: %s", self._archive.place, error)

    def _overloaded(self) -> PeerRefused:
        return PeerRefused(ResponseCode.SYSTEM_BUSY, OVERLOADED, str(self._archive.place))

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

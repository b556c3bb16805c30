"""The store against a list in memory, under random puts, reads, flushes, closes, kills and torn tails.

A kill leaves the files as they are (the page cache survives the process); a power cut also takes away bytes behind the
durable offset. Either may only lose what was not durable, from the end.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rmqkit.protocol.batch import BatchEntry, encode_batch
from rmqkit.protocol.record import decode_record
from rmqkit.store.message_store import GetStatus, MessageStore, PutStatus
from rmqkit.store.settings import StoreSettings
from tests.store.stores import message, read_all, small_settings

QUEUES = [("A", 0), ("A", 1), ("B", 0), ("%RETRY%g", 0)]
BODIES = st.binary(max_size=900)


class StoreMachine(RuleBasedStateMachine):
    """``messages`` is the log as it should be: queue, body and end offset of every record, oldest first."""

    @initialize(ext=st.booleans(), crc=st.booleans())
    def begin(self, ext: bool, crc: bool) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.settings: StoreSettings = small_settings(
            enable_consume_queue_ext=ext,
            consume_queue_ext_file_bytes=256,
            append_property_crc=crc,
            flush_interval_ms=3_600_000,  # rounds come when the machine says so
            queue_flush_interval_ms=3_600_000,
        )
        self.messages: list[tuple[tuple[str, int], bytes, int]] = []
        self.generation = 0
        self.start()

    def start(self) -> None:
        self.store = MessageStore(self.folder / str(self.generation), self.settings)
        self.store.open()

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.folder)

    @rule(place=st.sampled_from(QUEUES), body=BODIES)
    def put(self, place: tuple[str, int], body: bytes) -> None:
        result = self.store.put(message(*place, body=body, TAGS="t"))
        assert result.status is PutStatus.OK, result.reason
        assert result.queue_offset == sum(one[0] == place for one in self.messages)
        self.messages.append((place, body, result.end_offset))

    @rule(place=st.sampled_from(QUEUES), bodies=st.lists(BODIES, min_size=1, max_size=4))
    def put_batch(self, place: tuple[str, int], bodies: list[bytes]) -> None:
        entries = [BatchEntry(body, b"TAGS\x01t\x02") for body in bodies]
        result = self.store.put_batch(message(*place, body=encode_batch(entries)))
        assert result.status is PutStatus.OK, result.reason
        ends = [*result.physical_offsets[1:], result.end_offset]
        self.messages += [(place, body, end) for body, end in zip(bodies, ends, strict=True)]

    @rule(place=st.sampled_from(QUEUES), back=st.integers(0, 40), count=st.integers(1, 40))
    def read(self, place: tuple[str, int], back: int, count: int) -> None:
        bodies = [body for where, body, _ in self.messages if where == place]
        offset = max(0, len(bodies) - back)
        found = self.store.get(*place, offset, count_max=count)
        if not bodies:
            assert found.status is GetStatus.NO_MESSAGE_IN_QUEUE
        elif offset == len(bodies):
            assert found.status is GetStatus.OFFSET_OVERFLOW_ONE
        else:
            read = [decode_record(record).body for record in found.records]
            assert read == bodies[offset : offset + len(read)] and 0 < len(read) <= count

    @rule()
    def flush(self) -> None:
        self.store._flusher.flush_log()
        self.store._flusher.flush_queues()

    @rule()
    def close_and_open(self) -> None:
        self.store.close()
        self.start()

    @rule()
    def kill(self) -> None:
        """Nothing is lost: the next start sees what was in the page cache."""
        self.crash()
        self.start()

    @precondition(lambda self: self.store.durable_offset < self.store.max_physical_offset)
    @rule(data=st.data())
    def power_cut(self, data: st.DataObject) -> None:
        """The log loses its bytes from some point behind the durable offset on; queues keep what they have."""
        cut = data.draw(st.integers(self.store.durable_offset, self.store.max_physical_offset - 1), label="cut")
        self.crash()
        for path in (self.folder / str(self.generation) / "commitlog").iterdir():
            kept = max(0, min(cut - int(path.name), 4096))
            path.write_bytes(path.read_bytes()[:kept].ljust(4096, b"\0"))
        self.start()
        end = self.store.max_physical_offset
        kept_count = sum(self.store.max_offset(*place) for place in QUEUES)
        lost = self.messages[kept_count:]
        # a cut inside the properties of the last record may leave it readable: they have no checksum of their own
        assert all(message_end > cut for _, _, message_end in lost) and end <= max(cut + 900, 4096 * (cut // 4096 + 1))
        self.messages = self.messages[:kept_count]

    def crash(self) -> None:
        before = self.folder / str(self.generation)
        self.generation += 1
        shutil.copytree(before, self.folder / str(self.generation))
        self.store.close()
        shutil.rmtree(before)

    @invariant()
    def every_message_is_readable(self) -> None:
        for place in QUEUES:
            bodies = [body for where, body, _ in self.messages if where == place]
            assert self.store.max_offset(*place) == len(bodies)
            assert [record.body for record in read_all(self.store, *place)] == bodies


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)

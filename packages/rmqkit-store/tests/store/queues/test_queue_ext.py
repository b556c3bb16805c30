"""Extension units and their addresses: store.md §5."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

import pytest

from rmqkit.protocol.properties import find_property
from rmqkit.protocol.record import TRANSACTION_PREPARED, TRANSACTION_ROLLBACK, decode_record
from rmqkit.store.dispatcher import DispatchRequest
from rmqkit.store.log.mapped_file import file_name
from rmqkit.store.message_store import GetStatus, MessageStore
from rmqkit.store.queues.consume_queue import ENTRY, ConsumeQueue
from rmqkit.store.queues.queue_ext import ExtUnit, QueueExt, is_address
from tests.store.stores import copy_store, message, opened, put_all, small_settings

Answer = TypeVar("Answer")
FILE_BYTES = 100
BASE = -(1 << 63)


@pytest.fixture
def ext(tmp_path: Path) -> Iterator[QueueExt]:
    ext = QueueExt(tmp_path / "consumequeue_ext" / "T" / "0", FILE_BYTES)
    yield ext
    ext.queue.close()


def reloaded(ext: QueueExt) -> QueueExt:
    again = QueueExt(ext.queue.directories[0], FILE_BYTES)
    again.queue.load()
    again.recover()
    return again


def content(ext: QueueExt, start: int) -> bytes:
    return ext.queue.path_of(start).read_bytes()


@pytest.mark.parametrize(("code", "found"), [(-2147483649, True), (BASE, True), (-2147483648, False), (0, False)])
def test_addresses_are_below_every_hash(code: int, found: bool) -> None:
    assert is_address(code) is found


def test_unit_bytes(ext: QueueExt) -> None:
    assert ext.append(2598919, 0x1122334455, b"\x80\x01") == BASE
    assert content(ext, 0)[:22] == bytes.fromhex("0016 000000000027a807 0000001122334455 0002 8001")
    assert ext.append(1, 2) == BASE + 22


def test_unit_comes_back_from_its_address(ext: QueueExt) -> None:
    first, second = ext.append(-5, 77, b"bits"), ext.append(6, 78)
    assert ext.read(first) == ExtUnit(-5, 77, b"bits")
    assert ext.read(second) == ExtUnit(6, 78)


@pytest.mark.parametrize("address", [BASE + 20, BASE + 95, BASE + 100, BASE - 0 + 5000])
def test_address_without_unit_is_unknown(ext: QueueExt, address: int) -> None:
    ext.append(1, 2)
    assert ext.read(address) is None


def test_full_file_is_marked_and_the_unit_goes_to_the_next(ext: QueueExt) -> None:
    addresses = [ext.append(i, i) for i in range(5)]
    # 4 units end at 80: the fifth needs 20 + 4 free bytes and finds 20
    assert addresses == [BASE, BASE + 20, BASE + 40, BASE + 60, BASE + 100]
    assert content(ext, 0)[80:] == b"\xff\xff" + bytes(18)


def test_unit_with_exactly_four_spare_bytes_fits(ext: QueueExt) -> None:
    ext.append(0, 0, bytes(52))
    assert ext.append(1, 1, bytes(4)) == BASE + 72
    assert ext.append(2, 2) == BASE + 100


def test_unit_too_large_for_a_file_is_not_stored(ext: QueueExt) -> None:
    assert ext.append(9, 0, bytes(80)) == 9


def test_disk_that_refuses_costs_only_the_unit(ext: QueueExt, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(start: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ext.queue, "create", fail)
    assert ext.append(9, 0) == 9


@pytest.mark.parametrize("count", [0, 1, 4, 5, 9])
def test_recovery_walks_to_the_last_unit(ext: QueueExt, count: int) -> None:
    addresses = [ext.append(i, i) for i in range(count)]
    again = reloaded(ext)
    expected = ext.append(99, 99)
    assert again.append(99, 99) == expected
    assert [again.read(address) for address in addresses] == [ExtUnit(i, i) for i in range(count)]


def test_units_behind_the_last_address_of_the_queue_go(ext: QueueExt) -> None:
    addresses = [ext.append(i, i) for i in range(7)]
    again = reloaded(ext)
    again.truncate_behind(addresses[2])
    assert again.append(99, 99) == addresses[3]
    assert content(again, 0)[80:] == bytes(20), "the mark of the full file is gone too"


def test_without_any_address_everything_goes(ext: QueueExt) -> None:
    ext.append(1, 1)
    again = reloaded(ext)
    again.truncate_behind(None)
    assert again.append(2, 2) == BASE


def test_files_before_the_oldest_readable_unit_are_dropped(ext: QueueExt) -> None:
    addresses = [ext.append(i, i) for i in range(9)]
    assert ext.drop_expired(addresses[4]) == 0
    assert ext.drop_expired(addresses[8]) == 1
    assert ext.read(addresses[0]) is None
    assert ext.read(addresses[4]) == ExtUnit(4, 4)


def test_queue_stores_addresses_and_reads_tag_codes_through_them(ext: QueueExt, tmp_path: Path) -> None:
    queue = ConsumeQueue("T", 0, tmp_path / "consumequeue" / "T" / "0", 200, {}, ext)
    queue.append(0, 0, 100, 2598919, 55)
    assert queue.entry(0) == (0, 100, BASE)
    assert queue.tags_code(BASE) == 2598919
    assert queue.tags_code(-7) == -7
    assert queue.tags_code(BASE + 40) is None


def test_queue_without_extension_does_not_know_addresses(tmp_path: Path) -> None:
    queue = ConsumeQueue("T", 0, tmp_path / "consumequeue" / "T" / "0", 200, {})
    assert queue.tags_code(BASE) is None


def test_recovered_queue_cuts_its_extension(ext: QueueExt, tmp_path: Path) -> None:
    folder = tmp_path / "consumequeue" / "T" / "0"
    queue = ConsumeQueue("T", 0, folder, 200, {}, ext)
    for i in range(6):
        queue.append(i, i * 100, 100, i, i)
    queue.queue.files[0].write(4 * 20, bytes(40))
    again = ConsumeQueue("T", 0, folder, 200, {}, reloaded(ext))
    again.queue.load()
    again.recover()
    assert again.max_offset == 4
    again.append(4, 400, 100, 44, 44)
    assert again.entry(4) == (400, 100, BASE + 100)
    assert ENTRY.size == 20


# ---- bitmaps, through the store


class Recorder(Generic[Answer]):
    """A filter that gives one answer and records its calls."""

    def __init__(self, answer: Answer) -> None:
        self.asked: list[Any] = []
        self.answer = answer

    def __call__(self, *what: object) -> Answer:
        self.asked.append(what)
        return self.answer


def by_body(arrival: DispatchRequest) -> bytes:
    """Return the bitmap in a message's property, so that a test can choose the stored bitmap."""
    return find_property(arrival.properties, b"bits") or b""


def test_bitmap_of_a_message_is_in_its_unit(tmp_path: Path) -> None:
    with opened(tmp_path, small_settings(enable_consume_queue_ext=True), bitmap_of=by_body) as store:
        put_all(store, message(TAGS="TagA", bits="\x03ab"), message(TAGS="TagA"))
    unit = (tmp_path / "consumequeue_ext" / "TopicTest" / "0" / file_name(0)).read_bytes()[:43]
    stored_ms = unit[10:18]
    assert unit[:23] == bytes.fromhex("0017 000000000027a807") + stored_ms + bytes.fromhex("0003 036162")
    assert unit[23:41] == bytes.fromhex("0014 000000000027a807") + unit[33:41] and unit[41:] == b"\0\0"
    entries = (tmp_path / "consumequeue" / "TopicTest" / "0" / file_name(0)).read_bytes()
    assert entries[12:20] == bytes.fromhex("8000000000000000") and entries[32:40] == bytes.fromhex("8000000000000017")


def test_without_extension_nobody_requests_bitmaps(tmp_path: Path) -> None:
    bitmap_of = Recorder(b"")
    with opened(tmp_path, bitmap_of=bitmap_of) as store:
        put_all(store, message())
    assert bitmap_of.asked == []


def test_bitmap_is_requested_before_the_message_is_readable(tmp_path: Path) -> None:
    told: list[str] = []
    store = MessageStore(
        tmp_path,
        small_settings(enable_consume_queue_ext=True),
        bitmap_of=lambda arrival: bitmap_after(told, f"{arrival.queue_offset} of {store.max_offset('TopicTest', 0)}"),
        on_arrival=lambda arrivals: told.append(f"arrived {len(arrivals)}"),
    )
    store.open()
    put_all(store, message(), message())
    store.close()
    assert told == ["0 of 0", "arrived 1", "1 of 1", "arrived 1"]


def bitmap_after(told: list[str], what: str) -> bytes:
    told.append(what)
    return b""


def test_half_messages_have_no_bitmap(tmp_path: Path) -> None:
    bitmap_of = Recorder(b"")
    with opened(tmp_path, small_settings(enable_consume_queue_ext=True), bitmap_of=bitmap_of) as store:
        put_all(store, message(sys_flag=TRANSACTION_PREPARED), message(sys_flag=TRANSACTION_ROLLBACK))
    assert bitmap_of.asked == []


def test_bitmaps_are_made_again_when_the_queues_are(tmp_path: Path) -> None:
    settings = small_settings(enable_consume_queue_ext=True)
    with opened(tmp_path / "store", settings, bitmap_of=lambda arrival: b"first") as store:
        put_all(store, *(message(body=b"%d" % i) for i in range(3)))
        crashed = copy_store(tmp_path / "store", tmp_path / "crashed")
    for name in ("consumequeue", "consumequeue_ext"):
        shutil.rmtree(crashed / name)
    assert not (crashed / "checkpoint").exists(), "recovery scans the whole log"
    with opened(crashed, settings, bitmap_of=lambda arrival: b"again") as store:
        assert bitmaps(store) == [b"again"] * 3


def bitmaps(store: MessageStore) -> list[bytes | None]:
    """Return the bitmap of every entry of the first queue, as a reader's filter gets it. None: no unit."""
    entries = Recorder(answer=False)
    store.get("TopicTest", 0, 0, count_max=32, accept_entry=entries)
    return [None if unit is None else unit.bitmap for _, unit in entries.asked]


def test_entries_that_are_not_wanted_are_skipped_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path, small_settings(enable_consume_queue_ext=True), bitmap_of=by_body) as store:
        put_all(store, *(message(body=b"%d" % i, TAGS="TagA", bits="x" * i) for i in range(6)))
        slice_ = store.log.slice
        read: list[int] = []

        def slice_and_tell(at: int, size: int) -> memoryview | None:
            read.append(at)
            return slice_(at, size)

        monkeypatch.setattr(store.log, "slice", slice_and_tell)
        found = store.get(
            "TopicTest",
            0,
            0,
            count_max=32,
            accept_entry=lambda code, unit: unit is not None and len(unit.bitmap) % 2 == 1,
        )
        assert [decode_record(record).body for record in found.records] == [b"1", b"3", b"5"]
        assert (found.status, found.next_begin_offset, len(read)) == (GetStatus.FOUND, 6, 3)
        none = store.get("TopicTest", 0, 0, count_max=32, accept_entry=lambda code, unit: False)
        assert (none.status, none.next_begin_offset, none.records) == (GetStatus.NO_MATCHED_MESSAGE, 6, [])


def test_entry_test_sees_code_and_unit_after_the_tag_test(tmp_path: Path) -> None:
    with opened(tmp_path, small_settings(enable_consume_queue_ext=True), bitmap_of=by_body) as store:
        put_all(store, message(TAGS="TagA", bits="m"), message(TAGS="TagB"))
        stamps = [store.store_time_at("TopicTest", 0, i) for i in range(2)]
        entries = Recorder(answer=True)
        found = store.get(
            "TopicTest",
            0,
            0,
            count_max=32,
            codes=frozenset([2598919]),
            accept_entry=entries,
            accept=lambda record: len(record) > 0,
        )
        assert entries.asked == [(2598919, ExtUnit(2598919, stamps[0], b"m"))] and len(found.records) == 1


def test_entry_without_unit_is_shown_as_such(tmp_path: Path) -> None:
    """A store that once had extensions has an unknown code. A store that never had them has a plain code."""
    with opened(tmp_path / "with", small_settings(enable_consume_queue_ext=True)) as store:
        put_all(store, message(TAGS="TagA"))
    entries = Recorder(answer=True)
    with opened(tmp_path / "with") as store, opened(tmp_path / "never") as plain:
        put_all(plain, message(TAGS="TagA"))
        for one in (store, plain):
            assert one.get("TopicTest", 0, 0, count_max=1, accept_entry=entries).status is GetStatus.FOUND
    assert entries.asked == [(None, None), (2598919, None)]


@pytest.mark.parametrize("file_bytes", range(60, 110))
def test_units_are_whole_however_their_file_ends(tmp_path: Path, file_bytes: int) -> None:
    """A file is rolled with a mark, or without one where no mark fits."""
    ext = QueueExt(tmp_path / "ext", file_bytes)
    for number in range(9):
        ext.append(number, 1000 + number, b"b" * (number % 3))
    assert len(ext.queue.files) > 1
    assert all(ext.is_whole(file) for file in ext.queue.files)
    last = ext.queue.files[-1]
    last.write(0, bytes(last.size))
    assert not ext.is_whole(last)
    ext.queue.close()

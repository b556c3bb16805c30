"""Extension units and their addresses: store.md §5."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rmqkit.store.consume_queue import ENTRY, ConsumeQueue
from rmqkit.store.queue_ext import ExtUnit, QueueExt, is_address

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
    assert content(again, 0)[80:] == bytes(20), "the mark of the full file went too"


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
    queue = ConsumeQueue("T", 0, tmp_path / "consumequeue" / "T" / "0", 200, set(), ext)
    queue.append(0, 0, 100, 2598919, 55)
    assert queue.entry(0) == (0, 100, BASE)
    assert queue.tags_code(BASE) == 2598919
    assert queue.tags_code(-7) == -7
    assert queue.tags_code(BASE + 40) is None


def test_queue_without_extension_does_not_know_addresses(tmp_path: Path) -> None:
    queue = ConsumeQueue("T", 0, tmp_path / "consumequeue" / "T" / "0", 200, set())
    assert queue.tags_code(BASE) is None


def test_recovered_queue_cuts_its_extension(ext: QueueExt, tmp_path: Path) -> None:
    folder = tmp_path / "consumequeue" / "T" / "0"
    queue = ConsumeQueue("T", 0, folder, 200, set(), ext)
    for i in range(6):
        queue.append(i, i * 100, 100, i, i)
    queue.queue.files[0].write(4 * 20, bytes(40))
    again = ConsumeQueue("T", 0, folder, 200, set(), reloaded(ext))
    again.queue.load()
    again.recover()
    assert again.max_offset == 4
    again.append(4, 400, 100, 44, 44)
    assert again.entry(4) == (400, 100, BASE + 100)
    assert ENTRY.size == 20

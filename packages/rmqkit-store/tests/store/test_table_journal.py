"""Journals of tables: the lines, which changes a file lacks, and refusing disks (`rmqkit.store.table_journal`)."""

from __future__ import annotations

import errno
import json
import zlib
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from rmqkit.errors import StoreMismatch, StoreUnavailable
from rmqkit.protocol.schemas.topics import DataVersion, TopicConfig
from rmqkit.store.files import JsonFile
from rmqkit.store.table_journal import (
    TableJournal,
    apply,
    apply_journal,
    file_of,
    journal_of,
    lacking,
    read_journal,
    stored_table,
    version_of,
)
from rmqkit.system import disk
from tests.examples import examples

MEMBER = "topicConfigTable"


def version(counter):
    return DataVersion(counter, 0, counter * 10)


def line_of(text):
    return b"%08x %b\n" % (zlib.crc32(text), text)


HEADER = line_of(b'{"journal":1,"base":{"counter":1,"stateVersion":0,"timestamp":10}}')
CREATED = line_of(b'{"dataVersion":{"counter":2,"stateVersion":0,"timestamp":20},"topicConfigTable":{"T":{"perm":6}}}')
DELETED = line_of(b'{"dataVersion":{"counter":3,"stateVersion":0,"timestamp":30},"topicConfigTable":{"T":null}}')
MARK = line_of(b'{"saving":{"counter":2,"stateVersion":0,"timestamp":20}}')


class Journaled:
    """A table with its file and journal, as a broker uses them. ``states``: the table after each change."""

    def __init__(self, folder):
        self.file = JsonFile(folder / "topics.json")
        self.journal = TableJournal(journal_of(self.file.path))
        self.counter, self.rows = 1, {}
        self.states = [{}]
        self.file.save(self.content())
        self.journal.starts_at(version(1))

    def content(self):
        return {"dataVersion": version(self.counter), MEMBER: dict(self.rows)}

    def change(self, **rows):
        line = self.journal.add(version(self.counter + 1), {MEMBER: rows})
        self.journal.write(line)
        self.counter += 1
        self.rows = {name: row for name, row in (self.rows | rows).items() if row is not None}
        self.states.append(self.rows)

    def save(self, *between):
        """Write the file. ``between``: changes after the copy of the table was made."""
        mark, content, saved = self.journal.add_mark(version(self.counter)), self.content(), version(self.counter)
        for rows in between:
            self.change(**rows)
        self.journal.write(mark)
        self.file.save(content)
        self.journal.drop(mark, saved)

    def stored(self):
        return stored_table(self.file.path)

    def lines(self):
        return self.journal.path.read_bytes().splitlines(keepends=True) if self.journal.path.exists() else []


@pytest.fixture
def table(tmp_path):
    return Journaled(tmp_path)


def test_the_lines_of_a_journal(table):
    table.change(T={"perm": 6})
    table.change(T=None)
    assert table.journal.path.name == "topics.journal" and file_of(table.journal.path) == table.file.path
    assert table.lines() == [HEADER, CREATED, DELETED]
    found = read_journal(HEADER + CREATED + MARK, table.journal.path)
    assert (found.base, found.damage) == (version(1), "")
    assert [one.rows for one in found.changes] == [{MEMBER: {"T": {"perm": 6}}}]
    assert found.entries[1] == version(2)


def test_rows_of_structs_are_written_as_in_the_file(table):
    config = TopicConfig("T", 2, 3, attributes=None)
    table.change(T=config)
    row = table.stored()[MEMBER]["T"]
    assert "attributes" not in row
    assert msgspec.convert(row, TopicConfig) == TopicConfig("T", 2, 3)


@pytest.mark.parametrize(
    ("counter", "journal", "names"),
    [
        (1, HEADER + CREATED, {"T"}),
        (1, HEADER + CREATED + MARK + DELETED, set()),
        (2, HEADER + CREATED + MARK, {"old"}),
        (2, HEADER + CREATED + MARK + DELETED, {"old"}),
        (3, HEADER + CREATED + MARK, {"old"}),  # another table
        (1, b"", {"old"}),
        (1, HEADER, {"old"}),
        (1, HEADER[:-1], {"old"}),
    ],
)
def test_a_file_gets_the_changes_that_it_lacks(counter, journal, names, tmp_path):
    table = {"dataVersion": msgspec.to_builtins(version(counter)), MEMBER: {} if counter == 1 else {"old": {}}}
    if names == {"old"}:
        table[MEMBER] = {"old": {}}
    apply_journal(table, journal, tmp_path)
    assert set(table[MEMBER]) == names
    expected = counter if names == {"old"} and DELETED not in journal else 2 + (DELETED in journal)
    assert version_of(table) == version(expected)


def test_a_journal_of_another_table_is_not_applied(tmp_path):
    found = read_journal(HEADER + CREATED + MARK + DELETED, tmp_path)
    assert lacking(found, DataVersion(1, 0, 11), is_lost=False) is None
    assert lacking(found, DataVersion(1, 1, 10), is_lost=False) is None
    assert lacking(found, version(3), is_lost=False) is None  # versions of changes are not versions of files


@pytest.mark.parametrize(("counter", "count"), [(0, 2), (1, 2), (2, 1), (3, None)])
def test_a_lost_file_gets_a_journal_that_is_newer_than_its_backup(counter, count, tmp_path):
    found = read_journal(HEADER + CREATED + MARK + DELETED, tmp_path)
    changes = lacking(found, version(counter), is_lost=True)
    assert (None if changes is None else len(changes)) == count


def test_every_damaged_bit_ends_the_journal_before_its_line(tmp_path):
    lines = [HEADER, CREATED, MARK, DELETED]
    whole = b"".join(lines)
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << position % 8
        found = read_journal(bytes(damaged), tmp_path)
        ends = [sum(map(len, lines[:count])) for count in range(5)]
        number = max(count for count in range(5) if ends[count] <= position)
        # A damaged line feed joins a line with the next line; both are lost.
        assert found.sound_bytes == ends[number]
        assert found.damage
        assert len(found.changes) == lines[:number].count(CREATED)


def test_the_damage_names_what_is_lost(tmp_path):
    found = read_journal(HEADER + CREATED.replace(b"perm", b"Perm") + DELETED + CREATED, tmp_path)
    assert (found.lost, found.lost_changes) == (["T", "T"], 2)
    assert f"damaged at byte {len(HEADER)}: this change and 2 later changes are lost: T, T" in found.damage
    torn = read_journal(HEADER + CREATED[:-2], tmp_path)
    assert torn.damage == f"{len(CREATED) - 2} bytes at its end are no complete change"


@pytest.mark.parametrize("header", [b'{"journal":2,"base":{"counter":1}}', b'{"dataVersion":{"counter":1}}'])
def test_a_journal_of_a_later_release_is_refused(header, tmp_path):
    with pytest.raises(StoreMismatch, match="start and stop the release of rmqkit that wrote it"):
        read_journal(line_of(header) + CREATED, tmp_path)
    file = tmp_path / "topics.json"
    file.write_text(json.dumps({"dataVersion": {"counter": 1}, MEMBER: {"A": {}}}))
    journal_of(file).write_bytes(line_of(header))
    assert stored_table(file)[MEMBER] == {"A": {}}


def test_a_crc_over_something_else_is_damage(tmp_path):
    for text in (b"[]", b"{", b'{"other":1}', b"\xff", b""):
        assert read_journal(HEADER + line_of(text) + CREATED, tmp_path).sound_bytes == len(HEADER)


def test_files_that_cannot_be_read_are_no_table(tmp_path):
    file = tmp_path / "topics.json"
    assert stored_table(file) is None
    for text in ("", "[]", "{"):
        file.write_text(text)
        assert stored_table(file) is None


def test_a_written_file_removes_the_journal(table):
    table.change(T={"n": 1})
    table.save()
    assert not table.journal.path.exists() and table.journal.is_empty
    assert table.stored()[MEMBER] == {"T": {"n": 1}}
    table.change(U={"n": 2})
    assert read_journal(table.journal.path.read_bytes(), table.journal.path).base == version(2)
    assert table.stored()[MEMBER] == {"T": {"n": 1}, "U": {"n": 2}}


def test_changes_during_the_write_of_the_file_stay_in_the_journal(table):
    table.change(T={"n": 1})
    table.save({"T": None}, {"U": {"n": 2}})
    found = read_journal(table.journal.path.read_bytes(), table.journal.path)
    assert (found.base, len(found.entries)) == (version(2), 2)
    assert table.stored()[MEMBER] == {"U": {"n": 2}}
    table.change(V={"n": 3})
    table.save()
    assert table.stored()[MEMBER] == {"U": {"n": 2}, "V": {"n": 3}} and not table.lines()


def test_lines_are_written_in_the_order_of_their_adds(table):
    lines = [table.journal.add(version(number), {MEMBER: {"T": {"n": number}}}) for number in (2, 3, 4)]
    table.journal.write(lines[2])
    assert table.stored()[MEMBER] == {"T": {"n": 4}}
    size = table.journal.path.stat().st_size
    table.journal.write(lines[0])  # it is there already
    assert table.journal.path.stat().st_size == size


class Refusing:
    """A disk that writes a part of the data, and then refuses. ``keeps``: it does not cut files, either."""

    def __init__(self, monkeypatch, *, function="write_all", keeps=False):
        self.write_all, self.is_refusing, self.function = disk.write_all, True, function
        self.sync_data = disk.sync_data
        monkeypatch.setattr(disk, "write_all", self.write)
        monkeypatch.setattr(disk, "sync_data", self.sync)
        truncate = disk.truncate
        monkeypatch.setattr(disk, "truncate", lambda *given: self.refuse() if keeps else truncate(*given))

    def refuse(self):
        if self.is_refusing:
            raise OSError(errno.EIO, "Input/output error")

    def write(self, descriptor, data, position):
        if self.function == "write_all" and self.is_refusing:
            self.write_all(descriptor, data[: len(data) - 1], position)
            self.refuse()
        self.write_all(descriptor, data, position)

    def sync(self, descriptor):
        if self.function == "sync_data":
            self.refuse()
        self.sync_data(descriptor)


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("function", ["write_all", "sync_data"])
def test_a_refused_line_is_not_read_after_later_lines(function, keeps, table, monkeypatch):
    table.change(T={"n": 1})
    with monkeypatch.context() as patch:
        disk = Refusing(patch, function=function, keeps=keeps)
        long = table.journal.add(version(9), {MEMBER: {"refused": {"text": "x" * 500}, "T": None}})
        with pytest.raises(StoreUnavailable, match=r"topics.journal: errno 5"):
            table.journal.write(long)
        with pytest.raises(StoreUnavailable):
            table.change(V={"n": 3})
        disk.is_refusing = False
    table.change(U={"n": 2})
    found = read_journal(table.journal.path.read_bytes(), table.journal.path)
    assert not found.damage
    assert table.stored()[MEMBER] == {"T": {"n": 1}, "U": {"n": 2}}


def test_a_refused_first_line_leaves_no_journal(table, monkeypatch):
    with monkeypatch.context() as patch:
        Refusing(patch)
        with pytest.raises(StoreUnavailable):
            table.change(T={"n": 1})
    assert not table.journal.path.exists()
    table.change(U={"n": 1})
    assert table.stored()[MEMBER] == {"U": {"n": 1}}


def test_a_found_journal_is_removed_or_kept_aside_when_the_file_is_written(table):
    table.change(T={"n": 1})
    for aside in ("", ".damaged"):
        again = TableJournal(table.journal.path)
        table.journal.path.write_bytes(HEADER + CREATED)
        (rest := table.journal.path.with_name("topics.journal.tmp")).write_bytes(HEADER)  # of a kill
        assert len(again.read().changes) == 1 and not again.is_empty
        again.drop(None, version(2), aside=aside)
        assert again.is_empty and not table.journal.path.exists() and not rest.exists()
    assert table.journal.path.with_name("topics.journal.damaged").read_bytes() == HEADER + CREATED
    assert again.read() is None


_rows = st.dictionaries(
    st.sampled_from("abcé\n"), st.none() | st.fixed_dictionaries({"n": st.integers(0, 9)}), max_size=3
)
_steps = st.lists(
    st.tuples(st.just("change"), _rows) | st.tuples(st.just("save"), st.lists(_rows, max_size=2)), max_size=8
)


@examples(60, suppress=[HealthCheck.function_scoped_fixture])
@given(steps=_steps, data=st.data())
def test_file_and_journal_are_the_table_after_any_cut(steps, data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("journal")
    table = Journaled(folder)
    for kind, given_rows in steps:
        if kind == "change":
            table.change(**given_rows)
        else:
            table.save(*given_rows)
    assert table.stored()[MEMBER] == table.rows
    lines = table.lines()
    if not lines:
        return
    whole = b"".join(lines)
    cut = data.draw(st.integers(0, len(whole)))
    table.journal.path.write_bytes(whole[:cut])
    complete = whole[:cut].count(b"\n")
    missing = sum(b'"saving"' not in line for line in lines[max(complete, 1) :])
    assert table.stored()[MEMBER] == table.states[-1 - missing]


def test_changes_apply_to_members_that_the_file_lacks():
    table = {}
    apply(table, read_journal(HEADER + CREATED, Path("x.journal")).changes)
    assert table == {"dataVersion": msgspec.to_builtins(version(2)), MEMBER: {"T": {"perm": 6}}}

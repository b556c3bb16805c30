import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from msgspec import Struct, field

from rmqkit.errors import StoreMismatch, StoreUnavailable
from rmqkit.protocol import fastjson
from rmqkit.store.files import JsonFile, RowTexts


class Offsets(Struct, rename="camel"):
    offset_table: dict[str, dict[int, int]] = field(default_factory=dict)


ONE = Offsets({"TopicTest@group_a": {0: 5, 1: 7}})
TWO = Offsets({"TopicTest@group_a": {0: 6, 1: 7}})


@pytest.fixture
def file(tmp_path: Path) -> JsonFile:
    return JsonFile(tmp_path / "config" / "consumerOffset.json")


def fail(descriptor: int) -> None:
    raise OSError(5, "Input/output error")


def test_missing_files_are_an_empty_start(file: JsonFile) -> None:
    assert file.load(Offsets) is None


def test_integer_keys_are_written_bare(file: JsonFile) -> None:
    file.save(ONE)
    assert b'"TopicTest@group_a":{\n\t\t\t0:5,\n\t\t\t1:7\n' in file.path.read_bytes()
    assert file.load(Offsets) == ONE


def test_rows_whose_texts_are_kept_are_written_as_without(file: JsonFile) -> None:
    texts, rows = RowTexts(), {"a": {"line\nbreak": [1, {2: "x"}], "none": {}}, "b": {}}
    for table in (rows, {"b": rows["b"], "c": {"d": [[]]}}, {}):
        file.save({"table": table, "more": 1})
        expected = file.path.read_bytes()
        file.save({"table": texts.of(table), "more": 1})
        assert file.path.read_bytes() == expected


def test_rows_that_did_not_change_are_not_formatted_again() -> None:
    texts, rows = RowTexts(), {f"topic-{number}": {"queues": [number]} for number in range(1000)}
    texts.of(rows)
    calls = []
    sys.setprofile(lambda _, event, __: calls.append(event) if event == "call" else None)
    try:
        fastjson.dumps({"table": texts.of(rows | {"one": {"queues": [4]}})}, indent="\t")
    finally:
        sys.setprofile(None)
    assert len(calls) < 100, "a save costs the rows that changed, and not the number of all rows"


def test_what_java_writes_is_read(file: JsonFile) -> None:
    file.path.parent.mkdir()
    file.path.write_text('{\n\t"dataVersion":{"counter":3},\n\t"offsetTable":{"TopicTest@group_a":{0:5,1:7}}\n}')
    assert file.load(Offsets) == ONE


def test_first_save_makes_no_backup(file: JsonFile) -> None:
    file.save(ONE)
    assert not file.backup.exists()


def test_backup_holds_the_former_content(file: JsonFile) -> None:
    file.save(ONE)
    former = file.path.read_bytes()
    file.save(TWO)
    assert file.backup.read_bytes() == former
    assert file.load(Offsets) == TWO


@pytest.mark.parametrize("content", [b"", b"  \n", b'{"offsetTable":{"a', b'{"offsetTable":7}', b"\xff\xfe"])
def test_backup_is_taken_when_the_file_is_not_readable(file: JsonFile, content: bytes) -> None:
    file.save(ONE)
    file.save(TWO)
    file.path.write_bytes(content)
    assert file.load(Offsets) == ONE
    assert file.path.read_bytes() == file.backup.read_bytes()


def test_unreadable_file_never_becomes_the_backup(file: JsonFile) -> None:
    file.save(ONE)
    file.save(TWO)
    file.path.write_bytes(b"{broken")
    file.load(Offsets)
    file.save(TWO)
    assert not file.backup.exists() or file.backup.read_bytes() != b"{broken"
    assert file.load(Offsets) == TWO


def test_crash_between_rename_and_write_leaves_the_backup(file: JsonFile) -> None:
    """The load writes the file again. Otherwise it would be missing until its owner has something to save."""
    file.save(ONE)
    file.path.replace(file.backup)
    assert (file.load(Offsets, restores=False), file.path.exists()) == (ONE, False)
    assert file.load(Offsets) == ONE
    assert file.path.read_bytes() == file.backup.read_bytes()


def test_a_backup_is_used_even_if_the_file_cannot_be_written_again(
    file: JsonFile, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file.save(ONE)
    file.path.replace(file.backup)
    monkeypatch.setattr("rmqkit.system.disk.sync_file", fail)
    assert file.load(Offsets) == ONE
    assert "consumerOffset.json: errno 5 Input/output error; only its backup has the value" in caplog.text


def test_nothing_readable_is_an_error_that_changes_nothing(file: JsonFile) -> None:
    file.path.parent.mkdir()
    file.path.write_bytes(b"{broken")
    with pytest.raises(StoreMismatch, match=r"consumerOffset\.json and its backup cannot be read.*remove them"):
        file.load(Offsets)
    assert file.path.read_bytes() == b"{broken"


def test_failing_disk_is_reported_and_the_former_value_stays(file: JsonFile, monkeypatch: pytest.MonkeyPatch) -> None:
    file.save(ONE)
    monkeypatch.setattr("rmqkit.system.disk.sync_file", fail)
    with pytest.raises(StoreUnavailable, match=r"consumerOffset\.json: errno 5 Input/output error"):
        file.save(TWO)
    assert file.load(Offsets) == ONE


def test_two_threads_that_save_do_not_take_each_others_file(file: JsonFile) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(file.save, [ONE, TWO] * 20))
    assert file.load(Offsets) in (ONE, TWO)


def test_a_backup_that_is_taken_for_a_missing_file_is_reported(
    file: JsonFile, caplog: pytest.LogCaptureFixture
) -> None:
    file.save(ONE)
    file.save(TWO)
    file.path.unlink()
    assert file.load(Offsets) == ONE
    assert f"{file.path} is missing: using its backup, which may be older" in caplog.text


def test_the_content_of_another_file_is_none(file: JsonFile) -> None:
    """Otherwise an empty table would replace the real one."""
    file.save({"dataVersion": {"counter": 1}, "topicConfigTable": {"T": {"topicName": "T"}}})
    with pytest.raises(StoreMismatch, match="it holds topicConfigTable and nothing of a Offsets"):
        file.load(Offsets)
    for empty in ({}, {"dataVersion": {"counter": 1}}, {"offsetTable": {}}):
        file.save(empty)
        assert file.load(Offsets) == Offsets()

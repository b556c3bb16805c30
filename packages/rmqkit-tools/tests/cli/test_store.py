"""`rmq store`: what a person and a program get, exit codes, one-line errors."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from rmqkit.protocol import fastjson
from rmqkit.protocol.message import Message
from rmqkit.protocol.schemas.topics import DataVersion
from rmqkit.store.table_journal import TableJournal, journal_of, version_of
from rmqkit.sync import Producer
from tests.cli.in_process import rmq
from tests.golden_stores import GoldenStore, unpack_golden
from tests.interop.standalone import run_standalone


@pytest.fixture
def golden(tmp_path) -> GoldenStore:
    return unpack_golden("5.4.0", tmp_path)


@pytest.fixture
def config(golden, tmp_path) -> Path:
    path = tmp_path / "broker.conf"
    path.write_text(golden.conf)
    return path


def store(*arguments: object, exit_code: int = 0) -> subprocess.CompletedProcess[str]:
    done = rmq("store", *arguments)
    assert done.returncode == exit_code, done.stderr
    return done


def failed(*arguments: object, exit_code: int = 1) -> str:
    """Run a command that cannot do what was asked; its one line on stderr."""
    done = store(*arguments, exit_code=exit_code)
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("rmq: ")
    return line.removeprefix("rmq: ")


def test_a_sound_store(golden, config):
    table = store("verify", golden.root, "-c", config).stdout
    assert f"{golden.root}: sound" in table
    assert "records" in table and "534" in table
    report = json.loads(store("verify", golden.root, "-c", config, "--json").stdout)
    assert report["is_sound"] is True
    assert report["checked"]["records"] == 534
    assert report["findings"] == []


def test_changes_that_are_only_in_a_journal_are_named_and_written(golden, config):
    topics = golden.root / "config" / "topics.json"
    version = version_of(fastjson.loads(topics.read_bytes()))
    journal = TableJournal(journal_of(topics))
    journal.starts_at(version)
    journal.write(journal.add(DataVersion(version.counter + 1, 0, 1), {"topicConfigTable": {"New": {"perm": 6}}}))
    said = store("verify", golden.root, "-c", config).stdout
    assert f"{golden.root}: sound" in said
    assert "1 changes only in journals of topics and groups, which Apache's brokers do not read" in said
    assert f"run: rmq store repair {golden.root}" in said
    assert "done: " in store("repair", golden.root, "-c", config).stdout
    assert "New" in fastjson.loads(topics.read_bytes())["topicConfigTable"]
    assert "journals" not in store("verify", golden.root, "-c", config).stdout


@pytest.mark.parametrize("log_path", ["commitlog", "elsewhere/log"])
def test_a_copy_is_looked_at_itself_whatever_the_configuration_names(golden, config, tmp_path, log_path):
    copy = shutil.copytree(golden.root, tmp_path / "copy")
    log = min((copy / "commitlog").iterdir())
    data = bytearray(log.read_bytes())
    data[100] ^= 1
    log.write_bytes(data)
    named = golden.root / "commitlog"
    if log_path != "commitlog":
        named = tmp_path / log_path
        named.parent.mkdir()
        (golden.root / "commitlog").rename(named)
    config.write_text(f"{config.read_text()}storePathRootDir={golden.root}\nstorePathCommitLog={named}\n")
    assert f"{copy}: damaged" in store("verify", copy, "-c", config, exit_code=1).stdout
    assert f"{golden.root}: sound" in store("verify", golden.root, "-c", config).stdout
    if log_path != "commitlog":
        (copy / "commitlog").rename(copy / "gone")
        line = failed("verify", copy, "-c", config, exit_code=2)
        assert line.startswith(f"{config} has the commit log of {golden.root} in {named}, and {copy} has no commitlog")


def test_a_damaged_store_is_named_and_the_exit_code_is_1(golden, config):
    path = golden.root / f"commitlog/{0:020d}"
    content = bytearray(path.read_bytes())
    content[88] ^= 1  # the first byte of the first body
    path.write_bytes(content)
    done = store("verify", golden.root, "-c", config, exit_code=1)
    assert done.stdout.startswith(f"{path} at 0: body CRC: expected ")
    assert f"{golden.root}: damaged" in done.stdout
    assert done.stderr == ""
    report = json.loads(store("verify", golden.root, "-c", config, "--json", exit_code=1).stdout)
    assert report["counts"] == {"body CRC": 1}
    assert report["gaps"] == [{"path": str(path), "position": 0, "end": 244}]
    (finding,) = report["findings"]
    assert (finding["kind"], finding["path"], finding["position"]) == ("body CRC", str(path), 0)


def test_what_cannot_be_read_ends_stat_and_dump_with_exit_code_1(golden):
    path = golden.root / f"commitlog/{0:020d}"
    content = bytearray(path.read_bytes())
    content[4:8] = bytes(4)  # the first magic
    path.write_bytes(content)
    assert json.loads(store("stat", golden.root, "--json", exit_code=1).stdout)["records"] == 533
    done = store("dump", golden.root, "--json", exit_code=1)
    assert len(done.stdout.splitlines()) == len(golden.manifest["messages"]) - 1
    assert done.stderr.startswith(f"rmq: {path} at 0: record: expected a record")


def test_stat(golden):
    found = json.loads(store("stat", golden.root, "--json").stdout)
    assert (found["segments"], found["records"], found["max_offset"]) == (4, 534, 401770)
    (queue,) = [one for one in found["queues"] if (one["topic"], one["queue_id"]) == ("GoldInnerBatch", 0)]
    assert queue["messages"] > queue["records"]
    table = store("stat", golden.root).stdout
    assert "GoldInnerBatch" in table and "401770" in table


def test_dump_for_programs(golden):
    lines = store("dump", golden.root, "--topic", "GoldKey", "--queue", 1, "--json").stdout.splitlines()
    messages = [json.loads(line) for line in lines]
    expected = [
        (one["physicalOffset"], one["keys"])
        for one in sorted(golden.manifest["messages"], key=lambda one: one["physicalOffset"])
        if (one["topic"], one["queueId"]) == ("GoldKey", 1)
    ]
    assert [(one["physical_offset"], one["properties"]["KEYS"]) for one in messages] == expected
    assert messages[0]["body"] == "keyed 1"


def test_dump_for_people(golden):
    done = store("dump", golden.root, "--topic", "GoldKey", "--limit", 2)
    assert "keyed 0" in done.stdout and "keyed 1" in done.stdout and "keyed 2" not in done.stdout
    assert done.stderr == "rmq: there are more than 2 messages, --limit shows more\n"


def test_dump_by_time_and_key(golden):
    one = next(one for one in golden.manifest["messages"] if one.get("keys") == "key-3")
    stored = one["storeTimestamp"]
    arguments = ["dump", golden.root, "--json", "--key", "key-3"]
    (line,) = store(*arguments, "--from", stored, "--to", stored).stdout.splitlines()
    assert json.loads(line)["physical_offset"] == one["physicalOffset"]
    assert store(*arguments, "--from", stored + 1).stdout == ""
    assert store(*arguments, "--to", "2001-01-01T00:00:00+00:00").stdout == ""


def test_a_store_that_a_broker_holds(tmp_path):
    root = tmp_path / "store"
    with run_standalone(root, tmp_path) as standalone:
        with Producer("tests", standalone.namesrv_addr) as producer:
            producer.send(Message(topic="Held", body=b"kept"))
        in_use = f"store {root} is in use by another process: stop that broker or choose another directory"
        for command in ("verify", "stat", "dump"):
            assert failed(command, root) == f"{in_use}, or read the store as it is now with --read-only"
        assert failed("rebuild", root, "--queues") == failed("repair", root, "--dry-run") == in_use
        report = json.loads(store("verify", root, "--read-only", "--json").stdout)
        assert (report["is_sound"], report["is_live"], report["checked"]["records"]) == (True, True, 1)
        (line,) = store("dump", root, "--read-only", "--topic", "Held", "--json").stdout.splitlines()
        assert json.loads(line)["body"] == "kept"
        standalone.stop()
    assert json.loads(store("verify", root, "--json").stdout)["is_sound"] is True


def test_rebuild(golden, config):
    shutil.rmtree(golden.root / "consumequeue")
    made = json.loads(store("rebuild", golden.root, "--queues", "-c", config, "--json").stdout)
    assert made == {"records": 534, "queues": 34, "index_files": 0}
    line = f"{golden.root}: 534 records, 0 queues and 3 index files rebuilt\n"
    assert store("rebuild", golden.root, "--index", "-c", config).stdout == line
    assert f"{golden.root}: sound" in store("verify", golden.root, "-c", config).stdout
    assert failed("rebuild", golden.root, exit_code=2) == "nothing to rebuild: give --queues, --index or both"


def test_repair(golden, config):
    folder = golden.root / "consumequeue" / "GoldKey"
    shutil.rmtree(folder)
    queues = f"{golden.root}/consumequeue: rebuilt from the log"
    planned = store("repair", golden.root, "--dry-run", "-c", config).stdout.splitlines()
    assert planned == [f"would do: {queues}", f"{golden.root}: can be repaired"]
    assert not folder.exists()
    done = store("repair", golden.root, "-c", config).stdout.splitlines()
    assert done == [f"done: {queues}", f"{golden.root}: sound"]
    path = golden.root / f"commitlog/{0:020d}"
    content = bytearray(path.read_bytes())
    content[88] ^= 1  # the first byte of the first body
    path.write_bytes(content)
    bridged = store("repair", golden.root, "-c", config).stdout.splitlines()
    filler = f"done: {path}: replaced 244 damaged bytes at position 0 by a filler record"
    assert (bridged[0], bridged[-1]) == (filler, f"{golden.root}: sound")
    path.with_name("notes").touch()
    lost = store("repair", golden.root, "-c", config, exit_code=1).stdout.splitlines()
    assert lost[0].startswith(f"cannot be repaired: {path.with_name('notes')} at 0: file name: expected ")
    assert lost[1] == f"{golden.root}: damaged"
    repaired = json.loads(store("repair", golden.root, "--dry-run", "--json", "-c", config, exit_code=1).stdout)
    assert (repaired["steps"], repaired["is_dry_run"]) == ([], True)
    assert [one["kind"] for one in repaired["remaining"]] == ["file name"]


def test_one_line_errors(golden, tmp_path):
    missing = tmp_path / "none"
    for command in ("verify", "stat", "dump", "repair"):
        line = failed(command, missing)
        assert line == f"{missing} is not a store: there is no {missing}/commitlog: name its storePathRootDir"
    assert "give the broker.conf of the store" in failed("verify", golden.root)
    unreadable = failed("stat", golden.root, "-c", missing, exit_code=2)
    assert unreadable.startswith(f"cannot read configuration {missing}: ")
    expected = "time 'noon' must be ms since the epoch, now, or like 2026-01-31T12:00:00 or 2026-01-31#12:00:00:000"
    assert failed("dump", golden.root, "--from", "noon", exit_code=2) == expected
    told = json.loads(store("dump", golden.root, "--json", "--from", "noon", exit_code=2).stderr)
    assert (told["error"], told["exitCode"]) == (expected, 2)

"""Broadcasting's offsets in a file. Source: behaviour.md §5.6; store.md §9.8."""

from __future__ import annotations

import asyncio

import pytest

from rmqkit.client.consumer.offsets import LocalOffsetStore
from rmqkit.errors import ClientError
from rmqkit.protocol.schemas.clients import MessageQueue
from rmqkit.system import threads
from tests.client.peers import until

FIRST, SECOND = MessageQueue("TopicTest", "broker-a", 0), MessageQueue("TopicTest", "broker-a", 1)
TEXT = b'{"offsetTable":{{"topic":"TopicTest","brokerName":"broker-a","queueId":0}:3}}'


def table(root) -> LocalOffsetStore:
    return LocalOffsetStore(str(root), "10.0.0.1@DEFAULT", "G")


async def test_the_file_is_where_and_what_java_clients_have(tmp_path):
    offsets = table(tmp_path)
    offsets.raise_to(FIRST, 3)
    await offsets.save_all()
    assert offsets.path == tmp_path / "10.0.0.1@DEFAULT" / "G" / "offsets.json"
    assert offsets.path.read_bytes() == TEXT


async def test_a_file_of_a_java_client_is_read(tmp_path):
    offsets = table(tmp_path)
    offsets.path.parent.mkdir(parents=True)
    offsets.path.write_text(
        '{\n\t"offsetTable":{{\n\t\t"brokerName":"broker-a",\n\t\t"queueId":0,\n\t\t"topic":"TopicTest"\n\t}:3\n\t}\n}'
    )
    assert await offsets.fetch(FIRST) == 3
    assert offsets.known(FIRST) == 3
    assert await offsets.fetch(SECOND) is None


async def test_a_save_merges_and_keeps_the_content_before_as_a_backup(tmp_path):
    one, other = table(tmp_path), table(tmp_path)
    one.raise_to(FIRST, 3)
    await one.save(FIRST)
    other.raise_to(SECOND, 7)
    await other.send_changed()
    assert (await table(tmp_path).fetch(FIRST), await table(tmp_path).fetch(SECOND)) == (3, 7)
    assert one.path.with_name("offsets.json.bak").read_bytes() == TEXT


@pytest.mark.parametrize("content", [b"", b"{", b'{"offsetTable":{{"topic":7}:"x"}}', None], ids=repr)
async def test_an_unreadable_file_is_replaced_by_its_backup(tmp_path, content):
    offsets = table(tmp_path)
    offsets.path.parent.mkdir(parents=True)
    offsets.path.with_name("offsets.json.bak").write_bytes(TEXT)
    if content is not None:
        offsets.path.write_bytes(content)
    assert await offsets.fetch(FIRST) == 3


async def test_a_file_that_the_system_does_not_let_be_read_is_not_taken_for_none(tmp_path, caplog):
    """A consumer without offsets would begin at the end of its queues, and write that down."""
    offsets = table(tmp_path)
    offsets.path.mkdir(parents=True)
    with pytest.raises(ClientError, match=r"offsets in .*offsets\.json cannot be read: Is a directory"):
        await offsets.fetch(FIRST)
    offsets.raise_to(FIRST, 9)
    await offsets.save_all()
    assert "cannot save offsets in" in caplog.text
    offsets.path.rmdir()
    offsets.path.write_bytes(TEXT)
    assert await table(tmp_path).fetch(FIRST) == 3


async def test_what_did_not_change_is_not_written(tmp_path):
    offsets = table(tmp_path)
    offsets.raise_to(FIRST, 3)
    await offsets.save_all()
    offsets.path.unlink()
    await offsets.save_all()
    assert not offsets.path.exists()
    offsets.raise_to(FIRST, 4)
    await offsets.save_all()
    assert offsets.path.exists()


async def test_a_queue_that_is_forgotten_keeps_its_place_in_the_file(tmp_path):
    offsets = table(tmp_path)
    offsets.freeze(FIRST, 3)
    offsets.raise_to(FIRST, 9)
    await offsets.save_all()
    offsets.remove_offset(FIRST)
    assert offsets.known(FIRST) is None
    assert await offsets.fetch(FIRST) == 3


async def test_a_failed_save_is_logged_and_made_good(tmp_path, caplog):
    offsets = table(tmp_path / "file" / "below")
    (tmp_path / "file").write_bytes(b"")
    offsets.raise_to(FIRST, 3)
    await offsets.save_all()
    assert "cannot save offsets in" in caplog.text
    (tmp_path / "file").unlink()
    await offsets.save_all()
    assert await offsets.fetch(FIRST) == 3


async def test_a_save_that_is_cancelled_ends_with_its_thread_so_that_the_next_one_has_the_file_alone(
    tmp_path, monkeypatch
):
    gate, at_disk = threads.Event(), threads.Event()

    def fsync(number):
        at_disk.set()
        assert gate.wait(60)

    monkeypatch.setattr("rmqkit.system.disk.sync_file", fsync)
    offsets = table(tmp_path)
    offsets.raise_to(FIRST, 3)
    periodic = asyncio.create_task(offsets.send_changed())
    await until(at_disk.is_set, "the file")
    periodic.cancel()
    await asyncio.wait([periodic], timeout=0.05)
    offsets.raise_to(FIRST, 4)
    last = asyncio.create_task(offsets.save_all())
    await asyncio.sleep(0)
    was_writing = not periodic.done()
    gate.set()
    await last
    assert was_writing
    assert offsets.path.exists()
    assert await table(tmp_path).fetch(FIRST) == 4

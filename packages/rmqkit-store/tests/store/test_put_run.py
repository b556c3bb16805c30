"""Several messages with one write: store.md §3.6, §14."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmqkit.store.dispatcher import DispatchRequest
from rmqkit.store.settings import FlushDiskType, StoreSettings
from rmqkit.testing.clock import StandingClock
from tests.examples import examples
from tests.store.stores import HOST_V6, message, opened, put_all, read_all, small_settings, tree

LARGE = StoreSettings(commit_log_file_bytes=1 << 20, consume_queue_file_bytes=2000, index_entry_count=50)


def plain(topic="TopicTest", queue_id=0, tags="a", **fields):
    return message(topic, queue_id, TAGS=tags, KEYS="k", keys=(b"", b"k", tags.encode()), **fields)


def files(root: Path) -> dict[str, str]:
    return {name: digest for name, digest in tree(root).items() if name != "checkpoint" and "index" not in name}


@examples(20)
@given(
    st.lists(
        st.builds(
            plain,
            st.sampled_from(["TopicTest", "t" * 127, "%RETRY%" + "g" * 130]),
            st.integers(0, 2),
            st.sampled_from(["a", "b"]),
            body=st.binary(max_size=300),
            flag=st.integers(0, 9),
            sys_flag=st.sampled_from([0, 1, 2, 0x30]),
            reconsume_times=st.integers(0, 3),
            born_timestamp=st.integers(0, 1 << 60),
        ),
        min_size=1,
        max_size=20,
    ),
    st.booleans(),
    st.sampled_from([LARGE, small_settings()]),
)
def test_a_run_leaves_the_files_that_one_by_one_leaves(tmp_path_factory, messages, v6, settings):
    folder = tmp_path_factory.mktemp("runs")
    for one in messages:
        one.born_host = HOST_V6 if v6 else one.born_host
    openers = [plain(one.topic, one.queue_id) for one in messages]
    told: dict[str, list[DispatchRequest]] = {"single": [], "run": []}
    for name in told:
        with opened(folder / name, settings, clock=StandingClock(), on_arrival=told[name].extend) as store:
            put_all(store, *openers)
            if name == "single":
                results = put_all(store, *messages)
            elif (run := store.put_run(messages)) is None:
                put_all(store, *messages)
                assert settings is not LARGE
            else:
                places = [(one.physical_offset, one.queue_offset) for one in run]
                assert places == [(one.physical_offset, one.queue_offset) for one in results]
    assert files(folder / "single") == files(folder / "run")
    assert told["single"] == told["run"]
    indexes = [[path.read_bytes() for path in sorted((folder / name / "index").glob("*"))] for name in told]
    assert indexes[0] == indexes[1]


def test_a_run_is_one_write_to_the_log_and_one_to_each_queue_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path / "s", LARGE) as store:
        put_all(store, plain(), plain(queue_id=1))
        writes: list[int] = []
        real = os.pwrite

        def pwrite(descriptor, data, position):
            writes.append(len(data))
            return real(descriptor, data, position)

        monkeypatch.setattr("rmqkit.system.disk.pwrite", pwrite)
        run = store.put_run([plain(queue_id=number % 2) for number in range(6)])
        assert run is not None
        assert writes == [sum(one.size for one in run)]
        assert store.queues.write_held()
        assert writes[1:] == [80, 80]
        assert store.max_offset("TopicTest", 0) == store.max_offset("TopicTest", 1) == 4


@pytest.mark.parametrize(
    "odd",
    [
        plain("Other"),
        plain(queue_id=7),
        message(TAGS="a"),
        plain(sys_flag=4),
        plain(sys_flag=0x80),
        plain(body=bytes(5000)),
        plain(string=b"a\x01" + b"x" * 600 + b"\x02"),
        plain(string=b"a\x01b\0"),
        plain(queue_id=1 << 40),
        plain(reconsume_times=1 << 40),
    ],
)
def test_one_that_is_not_plain_leaves_all_to_be_put_one_by_one(tmp_path, odd):
    with opened(tmp_path / "s", StoreSettings(message_bytes_max=4999)) as store:
        put_all(store, plain())
        end = store.max_physical_offset
        assert store.put_run([plain(), odd, plain()]) is None
        assert (store.max_physical_offset, store.max_offset("TopicTest", 0)) == (end, 1)
        assert put_all(store, plain())[0].queue_offset == 1


def test_a_run_that_the_file_has_no_room_for_is_put_one_by_one(tmp_path):
    with opened(tmp_path / "s") as store:
        put_all(store, plain())
        assert store.put_run([plain(body=bytes(700)) for _ in range(6)]) is None
        assert store.put_run([plain(body=bytes(700)) for _ in range(4)]) is not None


def test_a_clock_set_back_is_for_single_puts(tmp_path):
    clock = StandingClock()
    with opened(tmp_path / "s", LARGE, clock=clock) as store:
        put_all(store, plain())
        clock.ms -= 1
        assert store.put_run([plain()]) is None


def test_a_write_that_fails_stores_none_of_the_run(tmp_path, monkeypatch):
    with opened(tmp_path / "s", LARGE) as store:
        put_all(store, plain())

        def fail(descriptor, data, position):
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr("rmqkit.system.disk.pwrite", fail)
            assert store.put_run([plain(body=b"lost"), plain(body=b"lost")]) is None
        run = store.put_run([plain(body=b"kept"), plain(body=b"kept")])
        assert run is not None and [one.queue_offset for one in run] == [1, 2]
        assert [one.body for one in read_all(store, "TopicTest")] == [b"hello", b"kept", b"kept"]


def test_a_closed_store_takes_no_run(tmp_path):
    with opened(tmp_path / "s", LARGE) as store:
        put_all(store, plain())
    assert store.put_run([plain()]) is None


def test_under_sync_flush_a_run_is_readable_when_it_is_durable(tmp_path):
    settings = StoreSettings(flush_disk_type=FlushDiskType.SYNC_FLUSH)
    done = threading.Event()
    with opened(tmp_path / "s", settings, on_durable=lambda offset, error: done.set()) as store:
        put_all(store, plain())
        store.request_flush()
        assert done.wait(60)
        store.dispatch()
        done.clear()
        assert store.put_run([plain(), plain()]) is not None
        readable = store.max_offset("TopicTest", 0)
        assert readable == (3 if store.durable_offset == store.max_physical_offset else 1)
        store.request_flush()
        assert done.wait(60)
        store.dispatch()
        assert store.max_offset("TopicTest", 0) == 3


def test_what_is_put_together_with_runs_is_reported_at_the_end(tmp_path):
    told: list[list[int]] = []
    arrived = lambda arrivals: told.append([one.queue_offset for one in arrivals])  # noqa: E731
    with opened(tmp_path / "s", LARGE, on_arrival=arrived) as store:
        put_all(store, plain())
        with store.batch():
            store.put_run([plain(), plain()])
            put_all(store, plain())
            store.put_run([plain()])
        assert told == [[0], [1, 2, 3, 4]]

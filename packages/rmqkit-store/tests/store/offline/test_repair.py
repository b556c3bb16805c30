"""Damage in every kind of file: it is named with its place, and files that the log determines are rebuilt."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmqkit.errors import StoreError, StoreLocked, StoreMismatch
from rmqkit.protocol.record import Record, iter_records
from rmqkit.store.message_store import MessageStore
from rmqkit.store.offline.check import dump, verify
from rmqkit.store.offline.findings import Kind
from rmqkit.store.offline.repair import repair
from tests.examples import examples
from tests.golden_stores import GoldenStore, unpack_golden
from tests.store.stores import copy_store, golden_settings, message, opened, put_all, read_all, small_settings, tree

DERIVED = ["consumequeue/GoldKey", "consumequeue_ext/GoldTag", "batchconsumequeue", "index"]
DAMAGE = ["truncated", "zero-filled", "bit-flipped"]
SIZES = small_settings()


@pytest.fixture(scope="module")
def pristine(tmp_path_factory) -> GoldenStore:
    golden = unpack_golden("5.4.0", tmp_path_factory.mktemp("pristine"))
    repair(golden.root, golden_settings(golden), is_dry_run=False)
    return golden


@pytest.fixture
def golden(pristine, tmp_path) -> GoldenStore:
    return GoldenStore(copy_store(pristine.root, tmp_path / "store"), pristine.manifest)


@pytest.fixture(scope="module")
def origin(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("origin") / "store"
    with opened(root) as store:
        put_all(store, *(message("AB"[i % 2], body=b"%03d" % i * 70, KEYS=f"k{i}", TAGS="t") for i in range(40)))
    (root / "config").mkdir()
    (root / "config" / "topics.json").write_bytes(b'{"topicConfigTable":{"A":{"perm":6,"topicName":"A"}},"more":{0:1}}')
    return root


@pytest.fixture
def small(origin, tmp_path) -> Path:
    return copy_store(origin, tmp_path / "store")


def first_file(folder: Path) -> Path:
    return min(path for path in folder.rglob("*") if path.is_file())


def damage(path: Path, how: str, at: int | None = None) -> int:
    """Damage a file and return the place of the damage."""
    content = bytearray(path.read_bytes())
    used = len(content.rstrip(b"\0"))
    at = used // 2 if at is None else at
    if how == "truncated":
        del content[at:]
    elif how == "zero-filled":
        content[:] = bytes(len(content))
        at = 0
    else:
        content[at] ^= 0x10
    path.write_bytes(content)
    return at


def bodies(root: Path) -> list[bytes]:
    return [one.body for one in dump(root)]


# ---------------------------------------------------------------- files that the log determines


@pytest.mark.parametrize("shift", range(len(DAMAGE)))
def test_derived_files_come_back(golden, shift):
    """Damage every kind of derived file at once. Over all cases each kind has every damage: a check costs a second."""
    damaged = {folder: DAMAGE[(at + shift) % len(DAMAGE)] for at, folder in enumerate(DERIVED)}
    for folder, how in damaged.items():
        damage(first_file(golden.root / folder), how)
    sizes = golden_settings(golden)
    report = verify(golden.root, sizes)
    for folder in damaged:
        assert any(folder.split("/")[0] in Path(finding.path).parts for finding in report.findings), (folder, report)
    before = tree(golden.root)
    planned = repair(golden.root, sizes, is_dry_run=True)
    assert tree(golden.root) == before
    assert planned.is_dry_run and planned.remaining == []
    done = repair(golden.root, sizes, is_dry_run=False)
    assert (done.steps, done.remaining) == (planned.steps, [])
    assert verify(golden.root, sizes).is_sound
    after = tree(golden.root)
    assert {path: after[path] for path in before if path.startswith("commitlog")} == {
        path: before[path] for path in before if path.startswith("commitlog")
    }


@pytest.mark.parametrize("how", DAMAGE)
def test_a_checkpoint_is_removed(small, how):
    path = small / "checkpoint"
    at = damage(path, how, 40 if how == "truncated" else 0)
    sizes = SIZES
    report = verify(small, sizes)
    if how == "zero-filled":  # such a file means that nothing was flushed yet: that is safe and no damage
        assert report.is_sound
        return
    expected = Kind.FILE_SIZE if how == "truncated" else Kind.CHECKPOINT
    assert [(one.kind, one.path, one.position) for one in report.findings] == [(expected, str(path), at)]
    done = repair(small, sizes, is_dry_run=False)
    assert [(step.path, step.action) for step in done.steps] == [(str(path), "removed")]
    assert done.remaining == [] and not path.exists()


@pytest.mark.parametrize("how", [*DAMAGE, "empty"])
@pytest.mark.parametrize("suffix", ["", ".bak"])
def test_configuration_comes_back_from_the_other_file(small, how, suffix):
    path = small / "config" / "topics.json"
    sound = path.read_bytes()
    path.with_name("topics.json.bak").write_bytes(sound)
    path = path.with_name("topics.json" + suffix)
    if how == "empty":
        path.write_bytes(b"")
    else:
        damage(path, how, 0 if how == "bit-flipped" else None)
    sizes = SIZES
    (finding,) = verify(small, sizes).findings
    assert (finding.kind, finding.path) == (Kind.CONFIG, str(path))
    assert (finding.position > 0) == (how == "truncated")  # where a value is cut off
    assert repair(small, sizes, is_dry_run=False).remaining == []
    assert path.read_bytes() == sound


def test_configuration_without_a_sound_copy_stays(small):
    path = small / "config" / "topics.json"
    path.with_name("topics.json.bak").unlink(missing_ok=True)
    damage(path, "truncated")
    done = repair(small, SIZES, is_dry_run=False)
    assert done.steps == [] and [one.path for one in done.remaining] == [str(path)]


def test_abort_may_hold_anything(small):
    sizes = SIZES
    for content in (b"", b"\0" * 10, b"123", b"\xff"):
        (small / "abort").write_bytes(content)
        report = verify(small, sizes)
        assert report.findings == [] and report.is_unclean


# ---------------------------------------------------------------- the log


def records_of(root: Path) -> list[tuple[Path, Record]]:
    return [
        (path, record) for path in sorted((root / "commitlog").iterdir()) for record in iter_records(path.read_bytes())
    ]


@pytest.mark.parametrize("how", ["truncated", "cut with zeros"])
def test_a_torn_tail_is_cleared_and_nothing_else(origin, tmp_path, how):
    root = copy_store(origin, tmp_path / "s")
    path, last = records_of(root)[-1]
    at = last.physical_offset % 4096
    content = path.read_bytes()
    path.write_bytes(content[: at + 100] + bytes(0 if how == "truncated" else 4096 - at - 100))
    report = verify(root, SIZES)
    assert report.tail is not None and (report.tail.path, report.tail.position) == (str(path), at)
    done = repair(root, SIZES, is_dry_run=False)
    assert done.remaining == []
    assert path.read_bytes() == content[:at] + bytes(4096 - at)
    assert (root / "repaired" / f"{path.name}-{at}").read_bytes() == content[at : at + 100].rstrip(b"\0")
    assert bodies(root) == bodies(origin)[:-1]
    with opened(root) as store:
        assert store.max_physical_offset == last.physical_offset
        assert (store.max_offset("A", 0), store.max_offset("B", 0)) == (20, 19)


def test_stale_bytes_behind_the_end_of_the_log_are_no_damage(origin, tmp_path):
    """An Apache broker leaves the bytes that its recovery cut off. The next record covers a part of them."""
    root = copy_store(origin, tmp_path / "s")
    path, last = records_of(root)[-1]
    end = last.physical_offset % 4096 + last.size
    content = bytearray(path.read_bytes())
    content[end : end + 150] = content[last.physical_offset % 4096 + 60 :][:150]  # the middle of a record
    path.write_bytes(content)
    report = verify(root, SIZES)
    assert report.is_sound and report.tail is None
    (root / "abort").touch()  # a record may have been torn then that no queue knows
    (finding,) = verify(root, SIZES).findings
    assert finding.position == end and "a torn record, or stale bytes after the log's end" in finding.found


def test_an_older_segment_cut_short_is_closed(origin, tmp_path):
    root = copy_store(origin, tmp_path / "s")
    segments = sorted((root / "commitlog").iterdir())
    lost = [record for path, record in records_of(root) if path == segments[1]][-2:]
    at = lost[0].physical_offset % 4096
    content = segments[1].read_bytes()
    segments[1].write_bytes(content[: at + 20])
    done = repair(root, SIZES, is_dry_run=False)
    actions = [step.action for step in done.steps if step.path == str(segments[1])]
    assert actions == ["extended with zeros to 4096 bytes", f"closed with a blank record at position {at}"]
    assert done.remaining == []  # blank entries keep the numbers of the two lost messages
    assert segments[1].read_bytes()[:at] == content[:at]
    expected = [body for body in bodies(origin) if body not in [record.body for record in lost]]
    assert bodies(root) == expected
    (root / "abort").touch()
    (root / "checkpoint").unlink(missing_ok=True)
    with opened(root):  # a recovery scans the place
        pass
    assert bodies(root) == expected


@pytest.mark.parametrize("part", ["magic", "body"])
def test_a_lost_record_becomes_a_filler_and_its_neighbours_stay(origin, tmp_path, part):
    root = copy_store(origin, tmp_path / "s")
    path, record = records_of(root)[5]
    at, end = record.physical_offset % 4096, record.physical_offset % 4096 + record.size
    damage(path, "bit-flipped", at + (4 if part == "magic" else 100))
    was, log = path.read_bytes(), tree(root / "commitlog")
    kind = Kind.RECORD if part == "magic" else Kind.BODY_CRC
    assert [one.position for one in verify(root, SIZES).findings if one.kind is kind] == [at]
    done = repair(root, SIZES, is_dry_run=False)
    said = f"replaced {record.size} damaged bytes at position {at} by a filler record"
    assert (str(path), said) in [(step.path, step.action) for step in done.steps]
    assert done.remaining == []
    now = path.read_bytes()
    assert (now[:at], now[end:]) == (was[:at], was[end:])
    assert {name for name, _ in tree(root / "commitlog").items() ^ log.items()} == {path.name}
    assert (root / "repaired" / f"{path.name}-{at}").read_bytes() == was[at:end]
    assert bodies(root) == [body for body in bodies(origin) if body != record.body]


def test_zeros_for_a_whole_segment(origin, tmp_path):
    root = copy_store(origin, tmp_path / "s")
    segments = sorted((root / "commitlog").iterdir())
    kept = [record.body for path, record in records_of(root) if path != segments[1]]
    damage(segments[1], "zero-filled")
    report = verify(root, SIZES)
    assert (str(segments[1]), 0) in [(one.path, one.position) for one in report.findings]
    done = repair(root, SIZES, is_dry_run=False)
    assert (str(segments[1]), "closed with a blank record at position 0") in [
        (step.path, step.action) for step in done.steps
    ]
    assert done.remaining == [] and bodies(root) == kept


def test_files_that_are_none_of_the_store_stay(origin, tmp_path):
    root = copy_store(origin, tmp_path / "s")
    (root / "commitlog" / "notes.txt").write_text("mine")
    done = repair(root, SIZES, is_dry_run=False)
    assert done.steps == [] and [one.kind for one in done.remaining] == [Kind.FILE_NAME]
    assert (root / "commitlog" / "notes.txt").read_text() == "mine"


def test_a_store_in_use_is_refused(tmp_path):
    with opened(tmp_path / "s") as store:
        put_all(store, message())
        before = tree(tmp_path / "s" / "consumequeue")
        for is_dry_run in (True, False):
            with pytest.raises(StoreLocked):
                repair(tmp_path / "s", SIZES, is_dry_run=is_dry_run)
        assert tree(tmp_path / "s" / "consumequeue") == before
        assert not (tmp_path / "s" / "repaired").exists()


@examples(15)
@given(
    file=st.floats(0, 0.999),
    place=st.floats(0, 0.999),
    how=st.sampled_from(DAMAGE),
    noise=st.binary(min_size=1, max_size=30),
)
def test_any_damage_is_named_or_harmless_and_a_broker_opens_or_says_why(
    origin, tmp_path_factory, file, place, how, noise
):
    root = copy_store(origin, tmp_path_factory.mktemp("any") / "s")
    paths = sorted(path for path in root.rglob("*") if path.is_file() and path.name not in ("lock", "topics.json"))
    path = paths[int(file * len(paths))]
    was = path.read_bytes()
    at = int(place * len(was.rstrip(b"\0")))
    if how == "bit-flipped":
        path.write_bytes((was[:at] + noise + was[at + len(noise) :])[: len(was)])
    elif path.name != "checkpoint" or how == "truncated":
        damage(path, how, at)
    is_log = path.parent.name == "commitlog"
    untouched = {body for other, record in records_of(origin) if other.name != path.name for body in [record.body]}
    done = repair(root, SIZES, is_dry_run=False)
    assert is_log or done.remaining == [], done
    assert untouched <= set(bodies(root)) or not is_log
    store = MessageStore(root, SIZES)
    try:
        store.open()
    except StoreError as error:
        assert is_log and len(str(error).splitlines()) == 1
    else:
        store.close()
        assert untouched <= set(bodies(root)) or not is_log
    shutil.rmtree(root)


# ---- files that were cut off


@pytest.mark.parametrize("cut", ["commitlog", "consumequeue", "consumequeue_ext", "index"])
@pytest.mark.parametrize("is_last", [True, False], ids=["last", "first"])
def test_a_file_that_was_cut_off_is_refused_with_an_advice_that_mends_it(
    cut: str, is_last: bool, tmp_path: Path
) -> None:
    sizes = small_settings(enable_consume_queue_ext=True, consume_queue_ext_file_bytes=512)
    with opened(tmp_path, sizes) as store:
        put_all(store, *(message(body=bytes(100), KEYS=f"k{i}", TAGS="a") for i in range(60)))
    paths = sorted(path for path in (tmp_path / cut).rglob("*") if path.is_file())
    path = paths[-1 if is_last else 0]
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size // 2 - 7)
    with pytest.raises(StoreMismatch, match=r"rmq store (repair|rebuild .* --index)"), opened(tmp_path, sizes):
        pass
    repair(tmp_path, sizes, is_dry_run=False)
    with opened(tmp_path, sizes) as store:
        kept = len(read_all(store, "TopicTest"))
        assert store.query("TopicTest", "k3", 8, 0, 1 << 62).physical_offsets
        assert store.get("TopicTest", 0, 0, count_max=8, codes=frozenset({97})).records
    assert kept == 60 if cut != "commitlog" else kept > 30


def test_a_file_that_is_too_long_has_another_setting_and_no_repair(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        put_all(store, message())
    with pytest.raises(StoreMismatch) as refused, opened(tmp_path, small_settings(consume_queue_file_bytes=100)):
        pass
    assert str(refused.value).endswith("set mappedFileSizeConsumeQueue to the size the store was written with")

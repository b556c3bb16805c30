"""Every decoder on damaged input: a value or its one documented error, and never more memory than the input justifies.

`tests.fuzz.targets` says what is documented; the sound inputs to damage are those kept for fuzzing.
"""

from __future__ import annotations

import contextlib
import tracemalloc
from collections.abc import Callable, Iterator

import pytest

from rmqkit.errors import BodyError, FrameError, HeaderError, RecordCorrupt
from rmqkit.protocol.command import JSON, ROCKETMQ, Frame, FrameSplitter, decode_command, decode_fields, decode_header
from rmqkit.protocol.compression import Compression, compress, decompress
from rmqkit.protocol.fastjson import decode_as, loads
from rmqkit.protocol.record import decode_batch, decode_record
from rmqkit.protocol.schemas.pull import PullMessageRequest
from tests.examples import many
from tests.fuzz.targets import TARGETS
from tests.sources import ROOT

CORPUS = ROOT / "tests" / "fuzz/corpus"
LYING_LENGTHS = (0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0x01000000)
FLIPS_MAX, LIES_MAX, PEAKS_MAX = 100, 60, 20
"""Of each input in the short form. Inputs of one decoder are much alike, and each is damaged at other places."""


def inputs(target: str) -> Iterator[tuple[int, bytes]]:
    """The sound inputs of a decoder by number; the last one that is printed is the one that failed."""
    for number, path in enumerate(sorted((CORPUS / target).iterdir())):
        print(path.name)
        yield number, path.read_bytes()


def some(number: int, size: int, most: int) -> range:
    """At most so many places of a size, others for each number."""
    step = -(-size // many(most)) if size > 0 else 1
    return range(number % step, size, step)


@pytest.mark.faults
@pytest.mark.parametrize("target", sorted(TARGETS))
def test_one_flipped_bit(target):
    for number, data in inputs(target):
        for bit in some(number, len(data) * 8, FLIPS_MAX):
            damaged = bytearray(data)
            damaged[bit // 8] ^= 1 << bit % 8
            TARGETS[target](bytes(damaged))


@pytest.mark.faults
@pytest.mark.parametrize("target", sorted(TARGETS))
def test_a_length_that_lies(target):
    for number, data in inputs(target):
        for lie in LYING_LENGTHS:
            for at in some(number, len(data) - 3, LIES_MAX):
                TARGETS[target](data[:at] + lie.to_bytes(4) + data[at + 4 :])


@pytest.fixture
def traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


def peak_bytes(decode: Callable[[bytes], object], data: bytes) -> int:
    """The most memory that was held while an input was decoded or refused; in a test with `traced`."""
    before, _ = tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    with contextlib.suppress(BodyError, FrameError, HeaderError, RecordCorrupt):
        decode(data)
    _, peak = tracemalloc.get_traced_memory()
    return peak - before


@pytest.mark.faults
@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("target", sorted(TARGETS))
def test_no_length_word_makes_a_decoder_allocate_what_it_announces(target):
    for number, data in inputs(target):
        for at in some(number, len(data) - 3, PEAKS_MAX):
            damaged = data[:at] + (0x7FFFFFFF).to_bytes(4) + data[at + 4 :]
            assert peak_bytes(TARGETS[target], damaged) < 8 << 20


@pytest.mark.usefixtures("traced")
def test_a_frame_of_2_gib_is_refused_by_its_first_eight_bytes():
    # Other threads of the process allocate, too, now and then.
    assert min(peak_bytes(FrameSplitter().feed, (0x7FFFFFFF).to_bytes(4) + bytes(4)) for _ in range(3)) < 10_000


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("compression", list(Compression))
def test_a_body_that_would_grow_is_given_up_at_the_limit(compression):
    packed = compress(bytes(50 << 20), compression)
    assert peak_bytes(lambda data: decompress(data, 1 | compression, bytes_max=1 << 20), packed) < 8 << 20


DEPTH = 100_000


@pytest.mark.parametrize("nest", [b"[" * DEPTH, b'{"a":' * DEPTH, b"[" * DEPTH + b"]" * DEPTH])
def test_deep_json_is_a_documented_error(nest):
    for header in (nest, b'{"code":1,"extFields":' + nest, b'{"code":1,"x":' + nest + b"}"):
        with pytest.raises(HeaderError):
            decode_fields(decode_command(Frame(JSON, header, b"")))
    with pytest.raises(HeaderError):
        decode_header(decode_command(Frame(JSON, b'{"code":1}', b"")), PullMessageRequest)
    with pytest.raises(BodyError):
        loads(nest)
    with pytest.raises(BodyError):
        decode_as(nest, dict[str, str])


@pytest.mark.parametrize("size", [0, 1, 3, 7, 8, 20, 21, 90])
def test_nothing_and_almost_nothing(size):
    for filler in (b"\x00", b"\xff"):
        data = filler * size
        for target in TARGETS.values():
            target(data)
    with pytest.raises(RecordCorrupt):
        decode_record(bytes(size))
    if size:
        with pytest.raises(BodyError):
            decode_batch(b"\xff" * size)
        with pytest.raises(HeaderError):
            decode_command(Frame(ROCKETMQ, b"\xff" * size, b""))

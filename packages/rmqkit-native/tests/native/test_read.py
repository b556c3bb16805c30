"""The records of a pull: the compiled core selects the same records as a loop over the entries."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmqkit.core import CORE
from rmqkit.store.queues.consume_queue import ENTRY

LOG = bytes(range(256)) * 8
START = 1 << 40
I32 = range(-(1 << 31), 1 << 31)


def looked_through(entries, end, codes, count_max, bytes_max):
    """The same by a loop; None where the reader has to look closer."""
    taken, passed, least = [], 0, 0
    for physical_offset, size, code in entries:
        if taken and (sum(map(len, taken)) + size > bytes_max or len(taken) == count_max):
            break
        at = physical_offset - START
        if size <= 0 or at < least or physical_offset + size > end:
            return None
        least, passed = at + size, passed + 1
        if codes is None or code in codes:
            taken.append(LOG[at : at + size])
        elif code not in I32:
            return None
    return len(taken), passed, b"".join(taken)


def selected(entries, end, codes, count_max, bytes_max):
    packed = b"".join(ENTRY.pack(*entry) for entry in entries)
    found = CORE.select_records(packed, memoryview(LOG), START, end, codes, count_max, bytes_max)
    if found is None:
        return None
    count, passed, size, at, copied = found
    body = LOG[at : at + size] if copied is None else copied
    assert len(body) == size
    return count, passed, body


CODES = st.sampled_from([7, 8, -9, (1 << 31) - 1, 1 << 31, -(1 << 63)])
IN_ORDER = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 60), CODES), max_size=30).map(
    lambda rows: [
        (START + at - size, size, code)
        for at, (_, size, code) in zip(accumulate(gap * 20 + size for gap, size, _ in rows), rows, strict=True)
    ]
)
ANY = st.lists(
    st.tuples(
        st.one_of(st.integers(START - 5, START + len(LOG) + 5), st.integers(-(1 << 63), (1 << 63) - 1)),
        st.one_of(st.integers(-3, 70), st.integers(-(1 << 31), (1 << 31) - 1)),
        CODES,
    ),
    max_size=5,
)


@given(
    st.one_of(IN_ORDER, ANY),
    st.integers(0, len(LOG)),
    st.one_of(st.none(), st.frozensets(CODES, max_size=3)),
    st.integers(1, 40),
    st.integers(0, 500),
)
def test_it_takes_what_a_loop_takes(entries, written, codes, count_max, bytes_max):
    wanted = entries, START + written, codes, count_max, bytes_max
    assert selected(*wanted) == looked_through(*wanted)


def test_records_that_lie_together_are_not_copied():
    rows = [(START + 10, 20, 7), (START + 30, 5, 7), (START + 40, 5, 8)]
    packed = [ENTRY.pack(*row) for row in rows]
    select = CORE.select_records
    assert select(b"".join(packed[:2]), memoryview(LOG), START, START + 99, None, 32, 999) == (2, 2, 25, 10, None)
    whole = select(b"".join(packed), memoryview(LOG), START, START + 99, None, 32, 999)
    assert whole == (3, 3, 30, 10, LOG[10:35] + LOG[40:45])
    assert select(b"", memoryview(LOG), START, START + 99, None, 32, 999) == (0, 0, 0, 0, None)


def test_a_file_that_is_shorter_than_it_is_said_to_be_is_refused():
    with pytest.raises(ValueError, match="the file ends before its end"):
        CORE.select_records(b"", memoryview(LOG), START, START + len(LOG) + 1, None, 1, 1)

"""Names of streams for names of other systems."""

from __future__ import annotations

import pytest

from rmqkit.protocol.names import lite_topic_fault
from rmqkit.streams import stream_name


@pytest.mark.parametrize("text", ["7", "a-b_C", "x" * 64, "x" * 65, "x" * 5000, "ö", "7.8", "a b", "h-1", "h-", ""])
def test_any_text_has_a_name_of_a_stream_of_its_own(text):
    for prefix in ("", "p-", "x" * 34):
        name = stream_name(text, prefix=prefix)
        assert name.startswith(prefix)
        assert lite_topic_fault(name) is None
        others = ("7 ", "a-b_C-", "x" * 66, "h-2", name[len(prefix) :] if text != name[len(prefix) :] else "other")
        assert name not in {stream_name(other, prefix=prefix) for other in others}


def test_a_usual_text_is_its_name():
    assert stream_name("task-7_a", prefix="t-") == "t-task-7_a"

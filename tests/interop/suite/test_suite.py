"""The suite about itself: how many behaviours there are, and that what our broker is excused from, it does refuse."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from rmqkit import Message, SendFailed
from rmqkit.protocol.codes import ResponseCode
from rmqkit.protocol.command import Command
from tests.interop.suite.apache_only import APACHE_ONLY
from tests.interop.suite.scene import Scene

BEHAVIOURS_MIN = 150


def behaviours() -> Iterator[ast.AsyncFunctionDef]:
    """Every behaviour of the suite."""
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.AsyncFunctionDef) and node.name.startswith("test_"):
                yield node


def test_the_suite_has_enough_behaviours_at_each_broker() -> None:
    everywhere = [one.name for one in behaviours() if "apache_only" not in map(named, one.decorator_list)]
    assert len(set(everywhere)) >= BEHAVIOURS_MIN


def named(decorator: ast.expr) -> str:
    return ast.unparse(decorator).partition("(")[0]


def test_every_behaviour_has_a_name_of_its_own_and_its_section_of_the_specification() -> None:
    assert [name for name, count in Counter(one.name for one in behaviours()).items() if count > 1] == []
    assert [one.name for one in behaviours() if "§" not in (ast.get_docstring(one) or "")] == []


async def test_what_only_apache_serves_is_refused_by_our_broker(scene: Scene) -> None:
    """remoting.md §4.6.1; behaviour.md §3.9, §9.3. A subject that our broker serves has to leave the table."""
    served = set()
    for subject, code in APACHE_ONLY.items():
        if code is not None and (await scene.ask_anyway(Command(code))).code != ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
            served.add(subject)
    producer = await scene.producer(retries=0)
    try:
        await producer.send(Message(topic=scene.topic, body=b"x", delay_ms=1500))
        served.add("deliver-at")
    except SendFailed as refusal:
        assert "timerWheelEnable is false" in str(refusal)
    assert served == (set() if scene.peer.is_ours else set(APACHE_ONLY))

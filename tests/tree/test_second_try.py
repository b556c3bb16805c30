"""Only few tests, all of other people's programs, get a second try, and its result decides whether the run fails."""

from pathlib import Path

import pytest

from tests import second_try

pytest_plugins = ["pytester"]

PEER, OURS = "tests/interop/test_a.py::test_one", "packages/rmqkit-server/tests/broker/test_b.py::test_two"
FILES = [f"tests/interop/test_{n}.py::test_one" for n in range(4)]
CODE = """
from pathlib import Path

def test_one():
    tries = Path({tries!r})
    tries.write_text(tries.read_text() + "." if tries.exists() else ".")
    assert len(tries.read_text()) >= {passes_at}

def test_other():
    pass
"""
SETUP = """
from pathlib import Path
import pytest

@pytest.fixture(scope="module")
def program():
    tries = Path({tries!r})
    tries.write_text(tries.read_text() + "." if tries.exists() else ".")
    assert len(tries.read_text()) >= {passes_at}

@pytest.mark.parametrize("number", range(9))
def test_it(program, number):
    pass
"""


@pytest.mark.parametrize(
    ("names", "may"),
    [
        *(([PEER], True), ([f"{PEER}[{n}]" for n in range(12)], True), (FILES[:3], True)),
        *(([], False), (FILES, False), ([PEER, OURS], False), ([OURS], False)),
    ],
)
def test_failures_of_few_files_of_peers_are_tried_again(names: list[str], may: bool) -> None:
    assert second_try.may_try_again(names) == may


def test_tests_of_a_program_that_ends_early_are_tried_again(pytester: pytest.Pytester) -> None:
    tries = Path(pytester.path, "tries")
    (pytester.mkdir("tests") / "interop").mkdir()
    (pytester.path / "tests/interop/test_it.py").write_text(SETUP.format(tries=str(tries), passes_at=2))
    ran = pytester.runpytest_inprocess("-p", "tests.second_try", "--second-try")
    assert (ran.ret, tries.read_text()) == (0, "..")


@pytest.mark.parametrize(
    ("folder", "passes_at", "options", "tries", "code"),
    [
        ("interop", 2, ["--second-try"], 2, 0),
        ("interop", 3, ["--second-try"], 2, 1),
        ("interop", 2, [], 1, 1),
        ("broker", 2, ["--second-try"], 1, 1),
    ],
)
def test_what_passes_alone_passes(
    pytester: pytest.Pytester, folder: str, passes_at: int, options: list[str], tries: int, code: int
) -> None:
    counted = Path(pytester.path, "tries")
    tests = pytester.mkdir("tests")
    (tests / folder).mkdir()
    (tests / folder / "test_it.py").write_text(CODE.format(tries=str(counted), passes_at=passes_at))
    ran = pytester.runpytest_inprocess("-p", "tests.second_try", *options)
    assert (ran.ret, counted.read_text()) == (code, "." * tries)
    if (tries, code) == (2, 0):
        ran.stdout.fnmatch_lines(["FAILED BESIDE OTHERS, PASSED ALONE: tests/interop/test_it.py::test_one"])

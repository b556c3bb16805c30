"""Stores, a broker's tables, the client's offset file and Spark's sink use files and threads only by `rmqkit.system`.

A simulator replaces `rmqkit.system`, so that a power cut or an order of threads can be repeated. A call past it would
work on the real disk. See docs/decisions/0027-two-seams.md.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.sources import FOLDERS

CHECKED = ("store", "broker", "namesrv", "client/consumer/offsets.py", "spark/sink")
EXCEPTIONS = {
    "store/offline": "tools that check and repair a stopped store",
    "store/archive": "segments are written by a process of their own, into a folder or an object store",
    "store/log/transient_pool.py": "maps memory without a file",
}
MODULES = {"concurrent", "fcntl", "mmap", "queue", "shutil", "tempfile", "threading"}
HARMLESS = {"environ", "fspath", "strerror", "sysconf"}
"""Names of ``os`` that use neither files nor threads. Constants are harmless, too."""
PATHS = {
    **dict.fromkeys(("exists", "is_dir", "is_file", "iterdir", "read_bytes", "rmdir", "stat"), 0),
    **dict.fromkeys(("chmod", "glob", "rename", "replace", "rglob", "symlink_to", "write_bytes"), 1),
    **dict.fromkeys(("mkdir", "read_text", "touch", "unlink", "write_text"), None),
}
"""Methods of paths that use the disk, with the number of their positional arguments; None: any number."""


def calls_past_the_seams(source: str) -> list[tuple[int, str]]:
    """Return line and name of each use of files or threads that does not go through `rmqkit.system`."""
    found: list[tuple[int, str]] = []
    tree = ast.parse(source)
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                found += [(node.lineno, one.name) for one in names if one.name.partition(".")[0] in MODULES]
            case ast.ImportFrom(module=str(module)) if module.partition(".")[0] in MODULES | {"os"}:
                found.append((node.lineno, module))
            case ast.ImportFrom(module=str(module)) if module.startswith("rmqkit.system."):
                found.append((node.lineno, f"{module}: import the module, so that its names can be replaced"))
            case ast.Attribute(value=ast.Name(id="os"), attr=name) if not name.isupper() and name not in HARMLESS:
                found.append((node.lineno, f"os.{name}"))
            case ast.Call(func=ast.Name(id="open")):
                found.append((node.lineno, "open"))
            case ast.Call(func=ast.Attribute(value=receiver, attr=name), args=args) if name in PATHS:
                is_other = ast.unparse(receiver) in ("disk", "msgspec.structs", "structs")
                if not is_other and PATHS[name] in (None, len(args)):
                    found.append((node.lineno, f".{name}()"))
    return found + [(line, "an object of a module: create it with a store") for line in _made_at_import(tree)]


def _made_at_import(tree: ast.Module) -> list[int]:
    """Return the lines that create locks, queues or threads at import, before a simulator replaces the seam."""
    bodies = [tree.body, *(node.body for node in ast.walk(tree) if isinstance(node, ast.ClassDef))]
    return [
        statement.lineno
        for body in bodies
        for statement in body
        if isinstance(statement, ast.Assign | ast.AnnAssign)
        and isinstance(statement.value, ast.Call)
        and ast.unparse(statement.value.func).startswith("threads.")
    ]


def checked() -> list[Path]:
    folders = [root / name for root in FOLDERS.values() for name in CHECKED]
    exceptions = [root / name for root in FOLDERS.values() for name in EXCEPTIONS]
    files = [path for one in folders for path in ([one] if one.is_file() else sorted(one.rglob("*.py")))]
    return [path for path in files if not any(path.is_relative_to(one) for one in exceptions)]


def test_stores_and_tables_use_files_and_threads_through_the_seams() -> None:
    allowed = {("handlers.py", "an object of a module: create it with a store")}  # its section uses no disk
    found = [
        f"{path}:{line}: {name}"
        for path in checked()
        for line, name in calls_past_the_seams(path.read_text())
        if (path.name, name) not in allowed
    ]
    assert len(checked()) > 100
    assert found == [], "use rmqkit.system.disk and rmqkit.system.threads"


@pytest.mark.parametrize(
    "source",
    [
        "import threading",
        "import concurrent.futures",
        "from queue import SimpleQueue",
        "from os import pwrite",
        "from rmqkit.system.disk import pwrite",
        "import os\nos.pwrite(1, b'', 0)",
        "import os\nwrite = os.pwrite",
        "with open(path) as file: pass",
        "path.unlink(missing_ok=True)",
        "path.replace(other)",
        "path.exists()",
        "_lock = threads.Lock()",
        "class A:\n    lock = threads.Lock()",
    ],
)
def test_a_call_past_the_seams_is_found(source: str) -> None:
    assert calls_past_the_seams(source)


@pytest.mark.parametrize(
    "source",
    [
        "from rmqkit.system import disk\ndisk.open(path, os.O_RDWR | os.SEEK_SET)",
        "disk.exists(path)",
        "text.replace('a', 'b')",
        "msgspec.structs.replace(one)",
        "os.strerror(5)",
        "def f():\n    lock = threads.Lock()",
    ],
)
def test_calls_of_the_seams_are_none(source: str) -> None:
    assert not calls_past_the_seams(source)

"""Figures of the source tree: how large its files are, how much of them is comment, and which imports form cycles.

``python -m tests.tree.house`` (`make house`) prints them for every room and every package; ``--json`` for programs. A
code line is a line with a token that is neither a comment, nor a docstring, nor part of an import.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from tests.sources import modules, modules_of_tests, package_of, place, statements

_BLANK = {tokenize.NEWLINE, tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER, tokenize.ENCODING}


@dataclass(frozen=True)
class FileFigures:
    """Figures of one file: all lines, code lines, lines with a comment, and asserts."""

    room: str
    lines: int
    code: int
    comments: int
    asserts: int


@dataclass(frozen=True)
class RoomFigures:
    """Figures of the files of a room. ``median_code`` counts only files that hold code."""

    files: int
    lines: int
    code: int
    median_code: float
    comment_percent: float
    asserts_per_1000: float


def file_figures(path: Path) -> FileFigures:
    text = path.read_text()
    tree = ast.parse(text)
    skipped: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            skipped.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                skipped.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    code: set[int] = set()
    comments: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            comments.add(token.start[0])
        elif token.type not in _BLANK:
            code.update(range(token.start[0], token.end[0] + 1))
    parts = place(path).parts
    return FileFigures(
        room="/".join(parts[:-1]) or ".",
        lines=text.count("\n"),
        code=len(code - skipped),
        comments=len(comments),
        asserts=sum(isinstance(node, ast.Assert) for node in ast.walk(tree)),
    )


def together(files: list[FileFigures]) -> RoomFigures:
    code = sum(file.code for file in files)
    return RoomFigures(
        files=len(files),
        lines=sum(file.lines for file in files),
        code=code,
        median_code=median([file.code for file in files if file.code] or [0]),
        comment_percent=round(100 * sum(file.comments for file in files) / max(1, code), 1),
        asserts_per_1000=round(1000 * sum(file.asserts for file in files) / max(1, code), 1),
    )


LINES_MAX = 60
REASON = "# Long: "
"""A comment that begins with this text, above a function, gives the reason for more than `LINES_MAX` lines."""


def long_functions(path: Path) -> list[str]:
    """Return the functions of a file that are longer than `LINES_MAX`, without a reason in place."""
    lines = path.read_text().splitlines()
    found = []
    for node in statements(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
            is_long = (node.end_lineno or node.lineno) - node.lineno + 1 > LINES_MAX
            if is_long and not lines[first - 2].strip().startswith(REASON):
                found.append(f"{path.name}:{node.lineno} {node.name}")
    return found


_OWN = {"self", "cls", "os", "sys"}
_PUBLIC = {"_asdict", "_fields", "_make", "_replace"}


def foreign_privates(path: Path) -> list[str]:
    """Return the accesses of a file to private attributes of other objects: `other._name`. Documented names of named
    tuples and enums, such as `_replace` and `_value_`, are public."""
    tree = ast.parse(path.read_text())
    own = _OWN | {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    return [
        f"{path.name}:{node.lineno} {ast.unparse(node)}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and not node.attr.endswith("_")
        and node.attr not in _PUBLIC
        and not (isinstance(node.value, ast.Name) and node.value.id in own)
        and not (isinstance(node.value, ast.Call) and ast.unparse(node.value) == "super()")
    ]


def imports() -> dict[str, set[str]]:
    """Return module → the modules of rmqkit that it imports anywhere: also in a function or under TYPE_CHECKING."""
    named = {_name(path): path for path in modules()}
    return {name: set(_imported(path, named)) - {name} for name, path in named.items()}


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return groups of modules that import each other (Tarjan's strongly connected components of two or more)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []
    for root in sorted(graph):
        if root in order:
            continue
        order[root] = low[root] = len(order)
        stack.append(root)
        walk = [(root, iter(sorted(graph[root])))]
        while walk:
            module, others = walk[-1]
            for other in others:
                if other not in order:
                    order[other] = low[other] = len(order)
                    stack.append(other)
                    walk.append((other, iter(sorted(graph[other]))))
                    break
                if other in stack:
                    low[module] = min(low[module], order[other])
            else:
                walk.pop()
                if walk:
                    low[walk[-1][0]] = min(low[walk[-1][0]], low[module])
                if low[module] == order[module]:
                    at = stack.index(module)
                    group, stack[at:] = stack[at:], []
                    if len(group) > 1:
                        found.append(sorted(group))
    return found


def _imported(path: Path, modules: dict[str, Path]) -> Iterator[str]:
    for node in statements(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module in modules:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name for name in names if name in modules)
            if any(name not in modules for name in names):
                yield str(node.module)


def _name(path: Path) -> str:
    parts = ("rmqkit", *place(path).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def main() -> None:
    parser = argparse.ArgumentParser(description="Figures of the source tree.")
    parser.add_argument("--json", action="store_true", help="print JSON")
    asked = parser.parse_args()
    rooms: dict[str, list[FileFigures]] = defaultdict(list)
    packages: dict[str, list[FileFigures]] = defaultdict(list)
    for path in modules():
        figures = file_figures(path)
        rooms[figures.room].append(figures)
        packages[package_of(path)].append(figures)
    total = together([file for files in rooms.values() for file in files])
    found = circles(imports())
    if asked.json:
        table, whole = ({name: asdict(together(files)) for name, files in parts.items()} for parts in (rooms, packages))
        print(json.dumps({"rooms": table, "packages": whole, "total": asdict(total), "circles": found}))
        return
    print(f"{'room':24}{'files':>6}{'lines':>8}{'code':>8}{'median':>8}{'comments':>10}{'asserts per 1,000':>19}")
    parts = [*sorted(rooms.items()), *packages.items()]
    for room, row in [*((room, together(files)) for room, files in parts), ("in all", total)]:
        print(
            f"{room:24}{row.files:6}{row.lines:8,}{row.code:8,}{row.median_code:8.0f}{row.comment_percent:9.1f}%"
            f"{row.asserts_per_1000:19.1f}"
        )
    print(f"circles: {len(found)}")
    for group in found:
        print("  " + ", ".join(group))
    long = [one for path in modules() for one in long_functions(path)]
    print(f"functions over {LINES_MAX} lines without a reason in place: {len(long)}")
    for one in long:
        print("  " + one)
    for name, paths in (("src", modules()), ("tests", modules_of_tests())):
        count = Counter(path.name for path in paths for _ in foreign_privates(path))
        print(f"private attributes of others, in {name}: {count.total()}, most in {dict(count.most_common(5))}")


if __name__ == "__main__":
    main()

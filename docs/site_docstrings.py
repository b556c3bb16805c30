"""The conversion of docstrings to the class reference of the site.

Docstrings end a line with ``::`` before an example, as Python's own do; on the site that is a plain colon. The
``Attributes:`` of structs are left out: `docs.generate` puts a table of all fields after each of them. Notes such as
``Source: store.md §3.3, §4`` become links to these sections.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import griffe

SPECIFICATION = ("remoting.md", "store.md", "behaviour.md", "grpc.md", "failover.md", "lite.md")
_REFERENCE = re.compile(r"\b([a-z-]+\.md|RFC \d+)\b|§(\d+(?:\.\d+)*)")
_ATTRIBUTES = re.compile(r"^Attributes:\n((?: +.*\n?|\s*\n)+)", re.MULTILINE)


class Colons(griffe.Extension):
    """Rewrites what was read from the source, before it is rendered."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is None:
            return
        text = re.sub(r"::$", ":", obj.docstring.value.replace("``", "`"), flags=re.MULTILINE)
        if isinstance(obj, griffe.Class) and _is_struct(obj):
            text = _ATTRIBUTES.sub("", text)
        obj.docstring.value = with_links(text)


def _is_struct(kind: griffe.Class) -> bool:
    """Return True if the bases of a class show that it is a struct."""
    bases = [str(base).rsplit(".", 1)[-1].partition("(")[0] for base in kind.bases]
    return any(base == "Struct" or base.endswith("Settings") for base in bases)


def references(text: str) -> Iterator[tuple[re.Match[str], str | None]]:
    """Yield each reference to a section, and the document named before it, as ``store.md`` or ``RFC 9113``."""
    page = None
    for found in _REFERENCE.finditer(text):
        if found[2] is None:
            page = found[1]
        else:
            yield found, page


def with_links(text: str) -> str:
    """Return a docstring with links to the sections of the specification, as seen from a page of the reference."""
    parts, end = [], 0
    for found, page in references(text):
        if page in SPECIFICATION:
            anchor = found[2].replace(".", "-")
            parts += [text[end : found.start()], f"[{found[0]}](../../spec/{page}#s{anchor})"]
            end = found.end()
    return "".join([*parts, text[end:]])

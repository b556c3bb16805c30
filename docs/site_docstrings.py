"""How docstrings become the class reference of the site.

Docstrings end a line with ``::`` before an example, as Python's own do; on the site that is a plain colon. The
``Attributes:`` of structs are left out: `docs.generate` puts a table of all fields behind each of them.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_ATTRIBUTES = re.compile(r"^Attributes:\n((?: +.*\n?|\s*\n)+)", re.MULTILINE)


class Colons(griffe.Extension):
    """Rewrites what was read from the source, before it is rendered."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is None:
            return
        text = re.sub(r"::$", ":", obj.docstring.value.replace("``", "`"), flags=re.MULTILINE)
        if isinstance(obj, griffe.Class) and _is_struct(obj):
            text = _ATTRIBUTES.sub("", text)
        obj.docstring.value = text


def _is_struct(kind: griffe.Class) -> bool:
    """Whether a class is a struct, as far as its bases say."""
    bases = [str(base).rsplit(".", 1)[-1].partition("(")[0] for base in kind.bases]
    return any(base == "Struct" or base.endswith("Settings") for base in bases)

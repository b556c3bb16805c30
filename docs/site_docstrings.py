"""Docstrings end a line with ``::`` before an example, as Python's own do; on the site that is a plain colon."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Colons(griffe.Extension):
    """Rewrites what was read from the source, before it is rendered."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"::$", ":", obj.docstring.value.replace("``", "`"), flags=re.MULTILINE)

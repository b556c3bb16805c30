"""The replacement of a seam's functions, for tests and simulators."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

__all__ = ["replaced_in"]


@contextmanager
def replaced_in(module: str, names: Collection[str], by: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Replace functions of a module while the context is entered. ``names``: the names that can be replaced.
    Raises ValueError: a name is unknown; nothing was replaced."""
    if unknown := sorted(set(by) - set(names)):
        raise ValueError(f"{module} has no {unknown[0]!r} to replace: use one of {', '.join(sorted(names))}")
    attributes = vars(sys.modules[module])
    former = {name: attributes[name] for name in by}
    attributes.update(by)
    try:
        yield
    finally:
        attributes.update(former)

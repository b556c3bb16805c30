"""Sentences that can be translated. Code marks them with `_`: ``_("topic {topic} deleted", topic=name)``.

A `Sentence` is a ``str`` with the English text, so logs, exceptions and the command line can use it directly. It also
has its ``template`` and ``values``. The web console looks up the template in the catalogue of another language and
fills in the values, which may be sentences, too (`rmqkit.console.html.translation`). Other operations on a sentence,
such as ``+`` and f-strings, return a plain ``str``, which the console shows in English. Pass ``enc_hook=plain`` to
msgspec, because msgspec does not encode subclasses of ``str``. ``make texts`` collects the templates with Babel.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

__all__ = ["Sentence", "_", "capital", "joined", "marked", "plain"]


class Sentence(str):
    """An English text that `_` made from ``template`` and ``values``."""

    __slots__ = ("template", "values")

    template: str
    values: dict[str, Any]

    def __str__(self) -> str:
        """Return the sentence itself, so that ``str(error)`` returns the sentence with which an error was raised."""
        return self

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (plain(self),)


def _(template: str, /, **values: Any) -> str:
    """Return ``template.format(**values)`` as a sentence. Values that are neither text nor numbers are converted with
    ``str``, so an exception becomes the sentence with which it was raised."""
    for name, value in values.items():
        if not isinstance(value, str | int | float):
            values[name] = str(value)
    found = Sentence(template.format(**values) if values else template)
    found.template = template
    found.values = values
    return found


def marked(text: str) -> str:
    """Return ``text`` unchanged, and mark it for the catalogues. Use this for templates that are filled later, and for
    the names of states."""
    return text


def capital(text: str) -> str:
    """Return a sentence with a capital first letter in its English text."""
    found = Sentence(text[:1].upper() + text[1:])
    if not isinstance(text, Sentence):
        return plain(found)
    found.template, found.values = text.template, text.values
    return found


def plain(text: str) -> str:
    """Return the text of a sentence as a ``str`` without template and values."""
    return str.__str__(text)


_PAIRS = {", ": marked("{first}, {second}"), "; ": marked("{first}; {second}")}


def joined(mark: str, parts: Iterable[str]) -> str:
    """Return ``mark.join(parts)``, as a sentence if a part is a sentence. ``mark`` is ``", "`` or ``"; "``."""
    found = list(parts)
    if not any(isinstance(one, Sentence) for one in found):
        return mark.join(found)
    return functools.reduce(lambda first, second: _(_PAIRS[mark], first=first, second=second), found)

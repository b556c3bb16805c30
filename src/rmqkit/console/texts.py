"""Other languages than English: the texts of templates, replaced when a template is compiled.

``zh.txt`` has a line for each text, ``English | 中文``; one without a bar stays as it is. Below an empty line stand
titles that views give. A template is compiled once per language, so pages cost the same in both. A text is

========================  ==========================================================================================
what stands between tags  as far as the next tag or ``{{ … }}``
an attribute              ``aria-label``, ``title``, ``data-label``, and ``data-text-…``, which scripts write
a string of an expression where it has a space or begins with a capital letter: ``m.empty("No group here.")``; not
                          what something is compared with, nor a key: ``counts["given up"]``, ``{"given up": 1}``
========================  ==========================================================================================

What is not in the file stays English; a test holds that everything of templates is. Values stay as they are: names,
what brokers say, JSON. The language is that of the ``rmq_lang`` cookie, which the switch of each page writes, or else
of ``Accept-Language``.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from importlib.resources import files

__all__ = ["LANGUAGES", "catalogue", "chosen", "texts_of", "translated"]

LANGUAGES = {"en": "English", "zh": "中文"}
_JINJA = r"\{%.*?%\}|\{\{.*?\}\}"
_INNER = re.compile(_JINJA, re.DOTALL)
_PARTS = re.compile(rf'(\{{#.*?#\}}|{_JINJA}|<(?:{_JINJA}|"(?:[^"{{]|{_JINJA})*"|[^>{{"])*>)', re.DOTALL)
_ATTRIBUTE = re.compile(r'\b(aria-label|title|data-label|data-text-[a-z-]+)="([^"{]*?[A-Za-z][^"{]*?)(?=["{])')
_STRING = re.compile(r"""'[^']*'|[=!]= "[^"]*"|\["[^"]*"\]|"[^"]*"(?=:)|"((?:[^"\\]|\\.)*)\"""")
_WORD = re.compile(r"[A-Za-z]{2}")


def chosen(cookie: str, accepted: str) -> str:
    """The language of a request, by its cookie and its Accept-Language."""
    if cookie in LANGUAGES:
        return cookie
    for one in accepted.split(","):
        name = one.partition(";")[0].strip().lower().partition("-")[0]
        if name in LANGUAGES:
            return name
    return "en"


@functools.cache
def catalogue(language: str) -> Mapping[str, str]:
    """The texts of a language; none of English, which is as templates have it."""
    if language == "en":
        return {}
    lines = files("rmqkit.console").joinpath(f"{language}.txt").read_text("utf-8").splitlines()
    pairs = (line.partition(" | ") for line in lines if line)
    return {text: other if bar else text for text, bar, other in pairs}


def translated(source: str, language: str) -> str:
    """The source of a template in a language."""
    known = catalogue(language)
    return _replaced(source, lambda text: known.get(text, text)) if known else source


def texts_of(source: str) -> list[str]:
    """The texts of a template, in their order."""
    found: list[str] = []

    def note(text: str) -> str:
        found.append(text)
        return text

    _replaced(source, note)
    return found


def _replaced(source: str, replace: Callable[[str], str]) -> str:
    def string(match: re.Match[str]) -> str:
        text = match[1] or ""
        is_text = (
            _WORD.search(text)
            and (" " in text.strip() or text[:1].isupper())
            and "\\" not in text
            and not text.startswith("rmq ")
        )
        return f'"{_kept(text, replace)}"' if is_text else match[0]

    def attribute(match: re.Match[str]) -> str:
        return f'{match[1]}="{_kept(match[2], replace)}'

    pieces = _PARTS.split(source)
    for number, piece in enumerate(pieces):
        if number % 2 == 0:
            pieces[number] = _kept(piece, replace)
        elif piece[:2] in ("{%", "{{"):
            pieces[number] = _STRING.sub(string, piece)
        elif piece[:1] == "<":
            inner = _INNER.sub(lambda match: _STRING.sub(string, match[0]) if "'" not in match[0] else match[0], piece)
            pieces[number] = _ATTRIBUTE.sub(attribute, inner)
    return "".join(pieces)


def _kept(text: str, replace: Callable[[str], str]) -> str:
    """A text replaced, the spaces around it kept."""
    inner = " ".join(text.split())
    if not _WORD.search(inner) or inner.startswith("&"):
        return text
    begin = text[: len(text) - len(text.lstrip())]
    return begin + replace(inner) + text[len(text.rstrip()) :]

"""Other languages than English: the texts of templates, replaced when a template is compiled.

``zh.txt`` has a line for each text, ``English | 中文``; one without a bar stays as it is. Below an empty line stand
titles that views give. A template is compiled once per language, so pages cost the same in both. A text is

========================  ==========================================================================================
what stands between tags  as far as the next tag or ``{{ … }}``
an attribute              ``aria-label``, ``title``, ``data-label``, and ``data-text-…``, which scripts write
a string of an expression where it has a space or begins with a capital letter: ``m.empty("No group here.")``; not
                          what something is compared with, nor a key: ``counts["given up"]``, ``{"given up": 1}``
========================  ==========================================================================================

Sentences that Python makes, here and in `rmqkit.admin`, are finished when a page gets them, with their values in them;
logs, the audit and notices keep them so. ``zh_said.txt`` has a pattern for each, ``{} is deleted | {} 已删除``, and
`said` finds it again by what stands between the values. Its placeholders: ``{}`` a value, which may be a sentence
itself; ``{w}`` one that may also be a known word; ``{n}`` a name, without blanks; ``{#}`` a number. On the right
``{1}`` puts the second value there.

What is not in the files stays English; tests hold that everything of templates is, and every sentence of Python. Values
stay as they are: names, bodies, what brokers say, JSON. The language is that of the ``rmq_lang`` cookie, which the
switch of each page writes, or else of ``Accept-Language``.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from importlib.resources import files

from markupsafe import Markup, escape
from msgspec import Struct

__all__ = ["LANGUAGES", "catalogue", "chosen", "drawn", "said", "texts_of", "translated"]

LANGUAGES = {"en": "English", "zh": "中文"}
_JINJA = r"\{%.*?%\}|\{\{.*?\}\}"
_INNER = re.compile(_JINJA, re.DOTALL)
_PARTS = re.compile(rf'(\{{#.*?#\}}|{_JINJA}|<(?:{_JINJA}|"(?:[^"{{]|{_JINJA})*"|[^>{{"])*>)', re.DOTALL)
_ATTRIBUTE = re.compile(r'\b(aria-label|title|data-label|data-text-[a-z-]+)="([^"{]*?[A-Za-z][^"{]*?)(?=["{])')
_STRING = re.compile(r"""'[^']*'|[=!]= "[^"]*"|\["[^"]*"\]|"[^"]*"(?=:)|"((?:[^"\\]|\\.)*)\"""")
_WORD = re.compile(r"[A-Za-z]{2}")
_PLACE = re.compile(r"\{([nw#]?)\}")
_WIDE = "[\u3000-\u9fff\uff00-\uffef]"
_GAP = re.compile(f"(?<={_WIDE}) ?\0(?={_WIDE})|(?<={_WIDE})\0 (?={_WIDE})")
"""A blank between two texts that need none: where a sentence stands in another."""
_FIT = {"#": re.compile(r"[+-]?\d[\d,.]*%?"), "n": re.compile(r"\S+")}
_SAID_MAX = 800
"""Characters of the longest sentence: whatever is longer is a body."""
_DEPTH_MAX, _PARTS_MAX = 6, 20
_MARKS = {"; ": "；", ": ": "：", ", ": "，", " ": ""}
"""What may stand between two sentences, the weakest bond first; the last one only before a sentence."""


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
    return dict(_lines(f"{language}.txt"))


def _lines(name: str) -> list[tuple[str, str]]:
    lines = files("rmqkit.console").joinpath(name).read_text("utf-8").splitlines()
    return [(text, other if bar else text) for text, bar, other in (line.partition(" | ") for line in lines if line)]


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


class Pattern(Struct):
    """A sentence: what stands between its values, what each of them is, and the sentence of the other language."""

    between: list[str]
    kinds: list[str]
    other: str

    def values(self, text: str) -> list[str] | None:
        """The values that a sentence of this pattern has; each is as short as it can be."""
        first, *middle, last = self.between
        if not text.startswith(first) or not text.endswith(last):
            return None
        values, at, end = [], len(first), len(text) - len(last)
        for one in middle:
            found = text.find(one, at, end)
            if found < 0:
                return None
            values.append(text[at:found])
            at = found + len(one)
        values.append(text[at:end])
        kinds = zip(self.kinds, values, strict=True)
        fit = at <= end and all(kind not in _FIT or _FIT[kind].fullmatch(one) for kind, one in kinds)
        return values if fit else None


@functools.cache
def patterns(language: str) -> tuple[Mapping[str, str], list[Pattern]]:
    """Sentences without values, beginning with a small letter, and those with values, the most particular first."""
    whole = {_small(text): other for text, other in catalogue(language).items()}
    found = []
    for text, other in _lines(f"{language}_said.txt") if language != "en" else ():
        parts = _PLACE.split(_small(text))
        if len(parts) == 1:
            whole[parts[0]] = other
        else:
            found.append(Pattern(parts[::2], parts[1::2], _PLACE.sub("{}", other)))
    return whole, sorted(found, key=lambda one: -len("".join(one.between)))


@functools.lru_cache(8192)
def said(text: str, language: str, *, is_word: bool = False, depth: int = 0) -> str:
    """A sentence that Python made, in a language; names and what nobody knows stay as they are. A single word may be a
    name, and stays, too, unless ``is_word``. ``depth``: of the sentences within which it stands."""
    if language == "en" or len(text) > _SAID_MAX or depth > _DEPTH_MAX or not _WORD.search(text):
        return text
    if not is_word and " " not in text:
        return text
    whole, known = patterns(language)
    small = _small(text)
    if small in whole:
        return whole[small]
    inner = functools.partial(said, language=language, depth=depth + 1)
    if text[-1] == "." and (other := inner(text[:-1])) != text[:-1]:
        return f"{other}。"
    for mark, sign in _MARKS.items():
        rest = text.removeprefix(mark)
        if rest != text and (other := inner(rest, is_word=is_word)) != rest:
            return sign + other
    for pattern in known:
        if (values := pattern.values(small)) is not None:
            if not pattern.between[0]:
                values[0] = text[: len(values[0])]
            others = [inner(one, is_word=kind == "w") for kind, one in zip(pattern.kinds, values, strict=True)]
            inserted = [one if one == value else f"\0{one}\0" for one, value in zip(others, values, strict=True)]
            return _GAP.sub("", pattern.other.format(*inserted)).replace("\0", "")
    for mark, sign in _MARKS.items():
        parts = text.split(mark)
        if mark.strip() and 1 < len(parts) < _PARTS_MAX and parts != (others := [inner(one) for one in parts]):
            return sign.join(others)
    return text


def drawn(shape: Markup, language: str) -> Markup:
    """HTML that Python made, such as a chart, with its texts in a language."""
    if language == "en":
        return shape
    return Markup(_replaced(shape, lambda text: escape(said(Markup(text).unescape(), language, is_word=True))))


def _small(text: str) -> str:
    return text[:1].lower() + text[1:]


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

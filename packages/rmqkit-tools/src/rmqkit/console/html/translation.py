"""The texts of pages in other languages than English, from gettext catalogues.

A `Sentence` is translated when a page is rendered. Its template is looked up, and its values are inserted. A value may
also be a sentence. Other texts, such as names, bodies and remarks of brokers, are not translated. The filter ``text``
of templates also translates words that reach a page as values (`rmqkit.console.html.words`), and help texts.

If a template is missing in a catalogue, the whole sentence stays in English, with all sentences inside it.

``locale/LANGUAGE/LC_MESSAGES`` has two catalogues of each language, as ``.po`` to edit and ``.mo`` to read:

========  ==============================================================================================
console   all marked texts of `rmqkit.admin` and this package; a test requires every translation
settings  descriptions of the settings of servers; a missing description is shown in English
========  ==============================================================================================

The ``rmq_lang`` cookie chooses the language. The switch on each page sets it. The default is ``Accept-Language``.
"""

from __future__ import annotations

import functools
import gettext
import re
from importlib.resources import files
from typing import NoReturn

from rmqkit.sentences import Sentence, plain

__all__ = ["LANGUAGES", "chosen", "said"]

LANGUAGES = {"en": "English", "zh": "中文"}


def chosen(cookie: str, accepted: str) -> str:
    """Return the language of a request, from its cookie or its Accept-Language header."""
    if cookie in LANGUAGES:
        return cookie
    for one in accepted.split(","):
        name = one.partition(";")[0].strip().lower().partition("-")[0]
        if name in LANGUAGES:
            return name
    return "en"


class _Missing(gettext.NullTranslations):
    """The end of a chain of catalogues. It raises KeyError for a text that is in no catalogue."""

    def gettext(self, message: str) -> NoReturn:
        raise KeyError(message)


@functools.cache
def catalogue(language: str) -> gettext.NullTranslations:
    """Return one catalogue with all texts of a language other than English."""
    found: gettext.NullTranslations = _Missing()
    for domain in ("settings", "console"):
        with (files("rmqkit.console.html") / "locale" / language / "LC_MESSAGES" / f"{domain}.mo").open("rb") as file:
            first = gettext.GNUTranslations(file)
        first.add_fallback(found)
        found = first
    return found


def said(text: str, language: str, *, is_term: bool = False) -> str:
    """Return the translation of a sentence, and any other text unchanged. With ``is_term``, translate every text."""
    if language == "en" or not text or not (is_term or isinstance(text, Sentence)):
        return text
    known = catalogue(language)
    try:
        return _translated(text, known) if isinstance(text, Sentence) else known.gettext(text)
    except KeyError:
        return plain(text)


_WIDE = "[\u3000-\u9fff\uff00-\uffef]"
_GAP = re.compile(f"(?<={_WIDE}) ?\0(?={_WIDE})|(?<={_WIDE})\0 (?={_WIDE})")
"""The space between two Chinese characters at an edge of a translated value. ``\\0`` marks the edges."""


def _translated(sentence: Sentence, known: gettext.NullTranslations) -> str:
    template = known.gettext(sentence.template)
    if not (values := sentence.values):
        return template
    inner = {name: f"\0{_translated(one, known)}\0" for name, one in values.items() if isinstance(one, Sentence)}
    text = template.format(**(values | inner))
    return _GAP.sub("", text).replace("\0", "") if inner else text

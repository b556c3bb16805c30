"""The catalogues are complete and fresh."""

from __future__ import annotations

import string

import pytest

from rmqkit.console.html.translation import LANGUAGES
from tests.console import catalogues
from tests.console.catalogues import DOMAINS, LOCALE

OTHERS = [language for language in LANGUAGES if language != "en"]


def places(template: str) -> list[str]:
    """The values of a template, with their formats."""
    parsed = string.Formatter().parse(template)
    return sorted(f"{name}!{conversion}:{form}" for _, name, form, conversion in parsed if name is not None)


@pytest.mark.parametrize("language", OTHERS)
def test_every_marked_text_is_there_and_no_other(language: str) -> None:
    ours = {one.id for one in catalogues.marked() if one.id}
    theirs = {one.id for one in catalogues.stored("console", language) if one.id}
    assert len(ours) > 1000
    assert (ours - theirs, theirs - ours) == (set(), set()), "run: make texts"


@pytest.mark.parametrize("language", OTHERS)
def test_every_marked_text_is_translated_with_the_same_values(language: str) -> None:
    missing, wrong = [], []
    for one in catalogues.stored("console", language):
        if one.id and not one.string:
            missing.append(one.id)
        elif one.id and "{" in str(one.string) and places(str(one.id)) != places(str(one.string)):
            wrong.append((one.id, one.string))
    assert not missing, "write their msgstr into rmqkit/console/html/locale, then run: make texts"
    assert not wrong


@pytest.mark.parametrize("language", OTHERS)
@pytest.mark.parametrize("domain", DOMAINS)
def test_a_compiled_catalogue_is_that_of_its_source(domain: str, language: str) -> None:
    compiled = (LOCALE / language / "LC_MESSAGES" / f"{domain}.mo").read_bytes()
    assert compiled == catalogues.compiled(catalogues.stored(domain, language)), "run: make texts"


@pytest.mark.parametrize("language", OTHERS)
def test_descriptions_of_settings_that_are_gone_are_not_kept(language: str) -> None:
    ours = {one.id for one in catalogues.described()}
    assert {one.id for one in catalogues.stored("settings", language)} <= ours, "run: make texts"

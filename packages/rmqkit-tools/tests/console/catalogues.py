"""Updates the catalogues of the web console from the marked texts: ``make texts``.

``.po`` files keep their translations. New texts are added without one, and texts that are gone are removed. ``.mo``
files are compiled from them. `tests.console.test_catalogues` requires that nothing changes and nothing is missing.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Mapping

from babel.messages.catalog import Catalog
from babel.messages.extract import extract
from babel.messages.mofile import write_mo
from babel.messages.pofile import read_po, write_po

from rmqkit.admin.cluster.settings import settings_types
from rmqkit.console.html.translation import LANGUAGES
from rmqkit.settings import setting_table
from tests.sources import FOLDERS, modules, place

CONSOLE = FOLDERS["rmqkit-tools"] / "console"
LOCALE = CONSOLE / "html" / "locale"


@functools.cache
def marked() -> Catalog:
    """Return every text that is marked with ``_`` in Python and in templates."""
    found = Catalog()
    for paths, method in ((modules(), "python"), (CONSOLE.glob("html/templates/*.html"), "jinja2")):
        for path in sorted(paths, key=place):
            source = path.read_bytes()
            if method == "jinja2" or b"sentence" in source:
                for __, message, __, __ in extract(method, io.BytesIO(source), keywords={"_": None, "marked": None}):
                    assert isinstance(message, str)
                    found.add(message, locations=[(place(path).as_posix(), 0)])
    return found


def described() -> Catalog:
    """Return the description of every setting of our servers."""
    found = Catalog()
    for kind in settings_types():
        for __, __, setting in setting_table(kind).values():
            found.add(setting.help)
    return found


DOMAINS: Mapping[str, Callable[[], Catalog]] = {"console": marked, "settings": described}


def stored(domain: str, language: str) -> Catalog:
    """Return a catalogue as its ``.po`` file has it."""
    with (LOCALE / language / "LC_MESSAGES" / f"{domain}.po").open("rb") as file:
        return read_po(file, language, domain)


def updated(domain: str, language: str) -> Catalog:
    """Return a catalogue with the texts of today and the translations that it has."""
    known, found = stored(domain, language), Catalog(language, domain, header_comment="", fuzzy=False)
    found.creation_date = found.revision_date = known.creation_date
    for message in DOMAINS[domain]():
        if message.id:
            before = known.get(message.id)
            found.add(message.id, before.string if before else "", locations=message.locations)
    return found


def compiled(catalogue: Catalog) -> bytes:
    """Return a catalogue as its ``.mo`` file has it."""
    file = io.BytesIO()
    write_mo(file, catalogue)
    return file.getvalue()


def main() -> None:
    for language in LANGUAGES:
        for domain in DOMAINS if language != "en" else ():
            found, place = updated(domain, language), LOCALE / language / "LC_MESSAGES" / domain
            with place.with_suffix(".po").open("wb") as file:
                write_po(file, found, width=0, sort_output=True, include_lineno=False)
            place.with_suffix(".mo").write_bytes(compiled(stored(domain, language)))
            missing = [str(one.id) for one in found if one.id and not one.string]
            print(f"texts: {place.with_suffix('.po')}: {len(missing)} have no translation", *missing, sep="\n  ")


if __name__ == "__main__":
    main()

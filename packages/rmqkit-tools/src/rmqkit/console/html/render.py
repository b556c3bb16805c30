"""The rendering of pages as HTML, and the filters that format numbers, times and sizes in templates.

Templates escape all values. An unknown name in a template is an error. Templates mark their texts with ``_``, as Python
code does, and a sentence is translated when it is printed. A refresh renders only the ``live`` block of a page. Numbers
have a unit, times are in UTC, and an unknown value is a dash with a title.
"""

from __future__ import annotations

import functools
import json
import re
import shlex
import unicodedata
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote, urlencode

import jinja2
import msgspec
from markupsafe import Markup

from rmqkit.admin.cluster.runtime import release
from rmqkit.admin.diagnosis.health import span_text
from rmqkit.console.html.translation import said
from rmqkit.sentences import Sentence, _, plain

_SAFE_INTEGER = 1 << 53
_UNKNOWN, _UNKNOWN_TITLE = '<span class="unknown" title="{}">–</span>', _("unknown: no broker has reported it yet")
UNKNOWN = Markup(_UNKNOWN).format(_UNKNOWN_TITLE)


class Link:
    """A builder of addresses below the mount path of the console."""

    def __init__(self, root: str, env: str = "") -> None:
        self._root = root.rstrip("/")
        self._env = env

    def __call__(self, *parts: object, **query: object) -> str:
        """Return an address of the current cluster: ``link("topics", name, sort="lag")``."""
        return self._make(((self._env,) if self._env else ()) + parts, query)

    def out(self, *parts: object, **query: object) -> str:
        """Return an address outside of any cluster."""
        return self._make(parts, query)

    def to(self, env: str) -> str:
        """Return the address of a cluster's first page."""
        return f"{self._root}/{quote(env, safe='')}/"

    def _make(self, parts: tuple[object, ...], query: Mapping[str, object]) -> str:
        path = "/".join(quote(str(part), safe="") for part in parts)
        if parts == (self._env,):
            path += "/"
        wanted = {name.rstrip("_"): value for name, value in query.items() if value not in (None, "", False)}
        return f"{self._root}/{path}" + (f"?{urlencode(wanted)}" if wanted else "")


def html(template: str, values: Mapping[str, Any]) -> str:
    """Return a whole page as HTML, in the language ``lang`` of the values."""
    return _environment(values.get("lang", "en")).get_template(template).render(values)


def block(template: str, values: Mapping[str, Any], name: str = "live") -> str:
    """Return one block of a page as HTML."""
    found = _environment(values.get("lang", "en")).get_template(template)
    return "".join(found.blocks[name](found.new_context(dict(values))))


def as_json(value: Any) -> bytes:
    """Return the values of a page as JSON. Integers that browsers would round become text."""
    found = msgspec.to_builtins(value, str_keys=True, enc_hook=_plain)
    return json.dumps(_safe(found), ensure_ascii=False).encode("utf-8", "replace")


def _plain(value: Any) -> Any:
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value).decode("utf-8", "backslashreplace")
    return plain(str(value))


def _safe(value: Any) -> Any:
    match value:
        case bool():
            return value
        case int():
            return value if abs(value) < _SAFE_INTEGER else str(value)
        case dict():
            return {key: _safe(one) for key, one in value.items()}
        case list() | tuple():
            return [_safe(one) for one in value]
    return value


@functools.cache
def _environment(language: str) -> jinja2.Environment:
    unknown = Markup(_UNKNOWN).format(said(_UNKNOWN_TITLE, language))

    def shown(value: Any) -> Any:
        if isinstance(value, Markup):
            return unknown if value == UNKNOWN else value
        return said(value, language) if isinstance(value, Sentence) else value

    def term(value: Any) -> Any:
        return value if isinstance(value, Markup) else said(str(value), language, is_term=True)

    def described(value: str) -> Any:
        other = said(value, language, is_term=True)
        return other if language == "en" or other != value else Markup('<span lang="en">{}</span>').format(value)

    found = jinja2.Environment(
        loader=jinja2.PackageLoader("rmqkit.console.html"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=None if language == "en" else shown,
    )
    found.filters |= {
        "number": number,
        "rate": rate,
        "size": size,
        "span": span,
        "time": time,
        "clean": lambda text: clean(shown(text)),
        "breakable": lambda text: breakable(shown(text)),
        "text": term,
        "described": described,
        "release": release,
        "figure": _figure,
        "percent": lambda value: UNKNOWN if value is None else f"{value:.0%}",
    }
    found.tests["unknown"] = lambda value: value is None
    found.globals |= {"_": _, "shell": shell}
    found.globals["m"] = found.get_template(
        "macros.html"
    ).module  # a block that is rendered alone does not have the imports of its page
    return found


def _figure(text: str) -> float | None:
    """Return the first number in a figure of a broker; None if the text is not a number."""
    try:
        return float(text.split()[0])
    except (IndexError, ValueError):
        return None


def number(value: float | None) -> str | Markup:
    """Return a count with separators between thousands."""
    if value is None:
        return UNKNOWN
    return f"{value:,}" if isinstance(value, int) else f"{value:,.1f}"


def rate(value: float | None) -> str | Markup:
    """Return a rate per second."""
    if value is None:
        return UNKNOWN
    digits = 0 if value >= 100 or value == int(value) else 1
    return f"{value:,.{digits}f}/s"


def size(value: float | None) -> str | Markup:
    """Return a number of bytes in the largest unit with a value of at least 1."""
    if value is None:
        return UNKNOWN
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:,.0f} {unit}" if unit == "B" or value >= 100 else f"{value:,.1f} {unit}"
        value /= 1024
    return f"{value:,.1f} TiB"


def span(ms: float | None) -> str | Markup:
    """Return a span of time as text."""
    return UNKNOWN if ms is None else span_text(ms) if ms >= 1000 or ms == 0 else f"{ms:.0f} ms"


def time(ms: int | None, *, with_ms: bool = False) -> Markup:
    """Return a time in UTC. A script of the page adds the time in the zone of the browser."""
    if not ms or ms < 0:
        return UNKNOWN
    try:
        at = datetime.fromtimestamp(ms / 1000, UTC)
    except (ValueError, OverflowError, OSError):
        return Markup("{}").format(f"{ms} ms")
    machine = at.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    text = f"{at:%Y-%m-%d %H:%M:%S}" + (f".{ms % 1000:03}" if with_ms else "")
    return Markup('<time datetime="{}">{}<span class="zone"> UTC</span></time>').format(machine, text)


def shell(command: str, *words: object) -> str:
    """Return a command line that can be pasted: ``command`` unchanged, then the words, quoted for a shell."""
    return " ".join((command, *(shlex.quote(str(word)) for word in words)))


_BREAKS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[_.;,:/@#=+])(?=[^_.;,:/@#=+])")


def breakable(text: object) -> Markup:
    """Return a clean text with possible line breaks between its words: ``diskSpace|Ratio``, ``10.0.0.1@|7``."""
    return Markup("<wbr>").join(_BREAKS.split(clean(text)))


def clean(text: object) -> str:
    """Return a text in which characters that change the direction or hide parts of the text are escaped."""
    return "".join(
        one if one in "\n\t" or unicodedata.category(one) not in ("Cc", "Cf", "Cs") else f"\\u{ord(one):04x}"
        for one in str(text)
    )

"""HTML of pages, and the filters that write numbers, times and sizes in templates.

Templates escape everything, and an unknown name in one is an error. A page's ``live`` block is rendered alone when it
is refreshed. Numbers have a unit, times are UTC, and what is unknown is a dash that says so.
"""

from __future__ import annotations

import functools
import json
import re
import unicodedata
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote, urlencode

import jinja2
import msgspec
from markupsafe import Markup

from rmqkit.admin.health import span_text
from rmqkit.console import texts

_SAFE_INTEGER = 1 << 53
_TYPED = re.compile(r'(?<= value=")\{\{ ([^{}]+) \}\}(?=")|\{\{ ([^{}]+) \}\}(?=</textarea>)')
"""What somebody typed: it comes back as it is, in no other language."""
UNKNOWN = Markup('<span class="unknown" title="unknown: nobody told it yet">–</span>')


class Link:
    """Makes addresses below the place where the console is mounted."""

    def __init__(self, root: str, env: str = "") -> None:
        self._root = root.rstrip("/")
        self._env = env

    def __call__(self, *parts: object, **query: object) -> str:
        """An address of the current cluster: ``link("topics", name, sort="lag")``."""
        return self._make(((self._env,) if self._env else ()) + parts, query)

    def out(self, *parts: object, **query: object) -> str:
        """An address outside of any cluster."""
        return self._make(parts, query)

    def to(self, env: str) -> str:
        """The first page of a cluster."""
        return f"{self._root}/{quote(env, safe='')}/"

    def _make(self, parts: tuple[object, ...], query: Mapping[str, object]) -> str:
        path = "/".join(quote(str(part), safe="") for part in parts)
        if parts == (self._env,):
            path += "/"
        wanted = {name.rstrip("_"): value for name, value in query.items() if value not in (None, "", False)}
        return f"{self._root}/{path}" + (f"?{urlencode(wanted)}" if wanted else "")


def html(template: str, values: Mapping[str, Any]) -> str:
    """A whole page, in the language ``lang`` of the values."""
    return _environment(values.get("lang", "en")).get_template(template).render(values)


def block(template: str, values: Mapping[str, Any], name: str = "live") -> str:
    """One block of a page."""
    found = _environment(values.get("lang", "en")).get_template(template)
    return "".join(found.blocks[name](found.new_context(dict(values))))


def as_json(value: Any) -> bytes:
    """A page's values as JSON; whole numbers that browsers would round are text."""
    plain = msgspec.to_builtins(value, str_keys=True, enc_hook=_plain)
    return json.dumps(_safe(plain), ensure_ascii=False).encode("utf-8", "replace")


def _plain(value: Any) -> Any:
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value).decode("utf-8", "backslashreplace")
    return str(value)


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


class _Loader(jinja2.PackageLoader):
    """Finds templates, in a language."""

    def __init__(self, language: str) -> None:
        super().__init__("rmqkit.console")
        self._language = language

    def get_source(self, environment: jinja2.Environment, template: str) -> tuple[str, str, Callable[[], bool] | None]:
        source, name, is_fresh = super().get_source(environment, template)
        return _TYPED.sub(r"{{ (\1\2)|e }}", texts.translated(source, self._language)), name, is_fresh


def _said(value: Any, language: str) -> Any:
    """What an expression of a template has, in a language; what is HTML already stays."""
    if isinstance(value, Markup):
        return texts.drawn(UNKNOWN, language) if value == UNKNOWN else value
    return texts.said(value, language) if isinstance(value, str) else value


@functools.cache
def _environment(language: str) -> jinja2.Environment:
    say = functools.partial(texts.said, language=language)
    found = jinja2.Environment(
        loader=_Loader(language),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=None if language == "en" else functools.partial(_said, language=language),
    )
    found.filters |= {
        "number": number,
        "rate": rate,
        "size": size,
        "span": span,
        "time": time,
        "clean": clean,
        "breakable": breakable,
        "text": lambda text: text if isinstance(text, Markup) else say(str(text), is_word=True),
        "percent": lambda value: UNKNOWN if value is None else f"{value:.0%}",
    }
    found.tests["unknown"] = lambda value: value is None
    found.globals["m"] = found.get_template("macros.html").module  # blocks rendered alone know no imports of the page
    return found


def number(value: float | None) -> str | Markup:
    """A count with its thousands."""
    if value is None:
        return UNKNOWN
    return f"{value:,}" if isinstance(value, int) else f"{value:,.1f}"


def rate(value: float | None) -> str | Markup:
    """Something per second."""
    if value is None:
        return UNKNOWN
    digits = 0 if value >= 100 or value == int(value) else 1
    return f"{value:,.{digits}f}/s"


def size(value: float | None) -> str | Markup:
    """Bytes in the largest unit that keeps them above one."""
    if value is None:
        return UNKNOWN
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:,.0f} {unit}" if unit == "B" or value >= 100 else f"{value:,.1f} {unit}"
        value /= 1024
    return f"{value:,.1f} TiB"


def span(ms: float | None) -> str | Markup:
    """A span of time."""
    return UNKNOWN if ms is None else span_text(ms) if ms >= 1000 or ms == 0 else f"{ms:.0f} ms"


def time(ms: int | None, *, with_ms: bool = False) -> Markup:
    """A time in UTC; browsers show their own zone beside it."""
    if not ms or ms < 0:
        return UNKNOWN
    try:
        at = datetime.fromtimestamp(ms / 1000, UTC)
    except (ValueError, OverflowError, OSError):
        return Markup("{}").format(f"{ms} ms")
    machine = at.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    text = f"{at:%Y-%m-%d %H:%M:%S}" + (f".{ms % 1000:03}" if with_ms else "")
    return Markup('<time datetime="{}">{}<span class="zone"> UTC</span></time>').format(machine, text)


_BREAKS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[_.;,:/@#=+])(?=[^_.;,:/@#=+])")


def breakable(text: object) -> Markup:
    """A clean text that a narrow column breaks between its words, as in ``diskSpace|Ratio`` and ``10.0.0.1@|7``."""
    return Markup("<wbr>").join(_BREAKS.split(clean(text)))


def clean(text: object) -> str:
    """A text without characters that would turn its direction or hide it."""
    return "".join(
        one if one in "\n\t" or unicodedata.category(one) not in ("Cc", "Cf", "Cs") else f"\\u{ord(one):04x}"
        for one in str(text)
    )

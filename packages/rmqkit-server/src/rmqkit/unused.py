"""Settings of Apache's servers that have no effect here, with the reason and Apache's default.

A file that was written for Apache's server works unchanged: all its keys are known. Settings without an effect are
shown and can be changed like other settings. If they differ from the default, they are logged once, with the reason. A
value is refused if it would promise something that rmqkit does not do (``must_stay``). The tables are beside the
settings that have an effect: `rmqkit.broker.unused_settings`, `rmqkit.proxy.server.unused_settings`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import msgspec

from rmqkit.settings import Setting

__all__ = ["Unused", "unused_keys", "unused_notes", "unused_type"]


class Unused(msgspec.Struct, frozen=True):
    """Settings without an effect, for one reason. ``settings``: ``key=default``, separated by blanks."""

    reason: str
    settings: str
    must_stay: bool = False

    @property
    def defaults(self) -> dict[str, str]:
        """Apache's default of each key."""
        return {key: default for key, _, default in (word.partition("=") for word in self.settings.split())}


def unused_keys(groups: Iterable[Unused]) -> frozenset[str]:
    """Return the keys of a table."""
    return frozenset(key for group in groups for key in group.defaults)


def unused_type(name: str, groups: Iterable[Unused], module: str) -> type[msgspec.Struct]:
    """Return a settings type with a field for each key. `rmqkit.settings` reads, shows and changes these fields."""
    fields = [_field(key, default, group) for group in groups for key, default in group.defaults.items()]
    return msgspec.defstruct(name, fields, module=module, kw_only=True)


def unused_notes(groups: Iterable[Unused], texts: Mapping[str, str]) -> list[str]:
    """Return a note for each group in which settings of ``texts`` differ from the default."""
    notes = []
    for group in groups:
        defaults = group.defaults
        given = sorted((key, texts[key]) for key in defaults.keys() & texts.keys())
        those = [f"{key}={text}" for key, text in given if text.lower() != defaults[key].lower()]
        if those:
            notes.append(f"without effect here: {', '.join(those)} ({group.reason})")
    return notes


def _field(key: str, default: str, group: Unused) -> tuple[str, Any, bool | int | float | str]:
    value = _value(default)
    setting = Setting(key, group.reason, hot=True, only=default if group.must_stay else None)
    return key, Annotated[type(value), setting], value


def _value(default: str) -> bool | int | float | str:
    """Convert a default to a bool, int or float, if its text is exactly such a value; ``05`` remains a text."""
    if default in ("true", "false"):
        return default == "true"
    for kind in (int, float):
        try:
            value = kind(default)
        except ValueError:
            continue
        if str(value) == default:
            return value
    return default

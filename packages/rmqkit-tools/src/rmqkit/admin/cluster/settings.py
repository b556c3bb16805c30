"""The settings of a broker or name server with their meaning: `described` joins the answer of a server with our tables.

A server returns keys and texts. The tables of `rmqkit.settings` have the meaning, bounds and default of each key. They
also show if a key can be changed at run time. Keys of Apache's brokers without an effect in rmqkit are in
`rmqkit.broker.unused_settings`. A key that is in no table is shown unchanged.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import UNSET, Struct
from msgspec.structs import asdict

from rmqkit.sentences import _
from rmqkit.settings import SECRET, Setting, bounds_text, setting_table, to_properties

__all__ = ["Compared", "ConfigRow", "SettingRow", "compared", "config_rows", "described"]


_GROUPS = {
    "BrokerSettings": _("Broker"),
    "StoreSettings": _("Store"),
    "AuthenticationSettings": _("Users and permissions"),
    "ConnectionSettings": _("Connections"),
    "ExporterSettings": _("Metrics"),
    "ServerTlsSettings": _("TLS of the server"),
    "ClientTlsSettings": _("TLS to other servers"),
    "NamesrvSettings": _("Name server"),
}


class SettingRow(Struct, rename="camel", kw_only=True):
    """One setting of a server.

    Attributes:
        group: the component of the setting; empty for an unknown key.
        value: the value at the server; a secret is masked.
        default: our default; empty for an unknown key.
        hot: True if the setting can be changed at run time.
        help: one sentence about the setting; empty for an unknown key.
        is_known: True if rmqkit has this setting.
        is_default: True if the value is our default.
    """

    key: str
    value: str
    group: str = ""
    default: str = ""
    bounds: str = ""
    hot: bool = False
    secret: bool = False
    help: str = ""
    is_known: bool = False
    is_default: bool = False


class Compared(Struct, rename="camel", kw_only=True):
    """A setting at several servers, with its values by address. None means that the server does not report the key."""

    key: str
    values: dict[str, str | None]
    help: str = ""

    @property
    def differs(self) -> bool:
        """Return True if the servers have different values."""
        return len(set(self.values.values())) > 1


class ConfigRow(Struct, rename="camel"):
    """One setting of a topic or group at each broker. ``differs``: True if the brokers have different values."""

    name: str
    values: dict[str, str]
    differs: bool


def described(properties: Mapping[str, str]) -> list[SettingRow]:
    """Return every setting in the answer of a server, joined with our tables.

    The rows are sorted by the order of `settings_types`, then by key. Unknown keys are last. This function is pure.
    """
    table = _table()
    rows = [_row(key, text, table.get(key)) for key, text in sorted(properties.items())]
    order = [*dict.fromkeys(group for *__, group in table.values()), ""]
    return sorted(rows, key=lambda row: order.index(row.group))


def compared(servers: Mapping[str, Mapping[str, str]]) -> list[Compared]:
    """Return each setting with its values at several servers. Secrets are masked. This function is pure."""
    rows = {address: {row.key: row for row in described(texts)} for address, texts in servers.items()}
    keys = sorted({key for known in rows.values() for key in known})
    return [
        Compared(
            key=key,
            values={address: known[key].value if key in known else None for address, known in rows.items()},
            help=next(known[key].help for known in rows.values() if key in known),
        )
        for key in keys
    ]


def _row(key: str, text: str, known: tuple[Any, Setting, str, str] | None) -> SettingRow:
    if known is None:
        is_secret = any(word in key.lower() for word in ("secret", "password", "credential"))
        return SettingRow(key=key, value=SECRET if is_secret and text else text, secret=is_secret)
    value_type, setting, default, group = known
    return SettingRow(
        key=key,
        group=group,
        value=SECRET if setting.secret and text else text,
        default=default,
        bounds=bounds_text(value_type, setting),
        hot=setting.hot,
        secret=setting.secret,
        help=setting.help,
        is_known=True,
        is_default=text == default,
    )


@functools.cache
def _table() -> dict[str, tuple[Any, Setting, str, str]]:
    """Return the type, declaration, default and group of every setting of our servers, by key."""
    table: dict[str, tuple[Any, Setting, str, str]] = {}
    for kind in settings_types():
        defaults = to_properties(kind())
        for key, (__, value_type, setting) in setting_table(kind).items():
            table.setdefault(key, (value_type, setting, defaults[key], _GROUPS[kind.__name__]))
    return table


def settings_types() -> Sequence[type[Struct]]:
    from rmqkit.broker.settings import BrokerSettings
    from rmqkit.metrics import ExporterSettings
    from rmqkit.namesrv.settings import NamesrvSettings
    from rmqkit.remoting.authentication import AuthenticationSettings
    from rmqkit.remoting.limits import ConnectionSettings
    from rmqkit.remoting.tls import ClientTlsSettings, ServerTlsSettings
    from rmqkit.store.settings import StoreSettings

    return (
        BrokerSettings,
        StoreSettings,
        AuthenticationSettings,
        ConnectionSettings,
        ExporterSettings,
        ServerTlsSettings,
        ClientTlsSettings,
        NamesrvSettings,
    )


def config_rows(configs: Mapping[str, Struct]) -> list[ConfigRow]:
    """Return each setting of a topic or a group with its values at several brokers. This function is pure."""
    shown = {broker: {key: _text(value) for key, value in asdict(one).items()} for broker, one in configs.items()}
    keys = dict.fromkeys(key for one in shown.values() for key in one if key not in ("topic_name", "group_name"))
    rows = []
    for key in keys:
        values = {broker: one.get(key, "") for broker, one in shown.items()}
        rows.append(ConfigRow(key.replace("_", " "), values, len(set(values.values())) > 1))
    return rows


def _text(value: Any) -> str:
    if isinstance(value, Struct):
        value = {key: one for key, one in asdict(value).items() if one is not None and one is not UNSET}
    if isinstance(value, dict):
        return ", ".join(f"{key}={one}" for key, one in sorted(value.items())) or _("none")
    return _("none") if value is None else str(value).lower() if isinstance(value, bool) else str(value)

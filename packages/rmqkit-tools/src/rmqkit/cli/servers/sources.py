"""The sources of a server's settings, and the notes about them that are logged.

=================================  ===========================================================================
source, from high to low priority  form
=================================  ===========================================================================
the command line                   options such as ``--port``, ``--set KEY=VALUE``
the environment                    ``RMQCONF_KEY``, for example ``RMQCONF_brokerIP1``
the file                           ``-c``; or else the file in which requests store their changes, if it exists
the environment's NAMESRV_ADDR     name servers, as for Java's brokers
=================================  ===========================================================================

SIGHUP reads the file again: hot settings change immediately, other changes are only logged. UPDATE_BROKER_CONFIG
and UPDATE_NAMESRV_CONFIG write to this file: the file of ``-c``, or else ``config/broker.conf`` in the store, or
``namesrv.conf`` beside the name server's KV file.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from rmqkit import settings as configuration
from rmqkit.broker import settings as broker_keys
from rmqkit.broker.settings import BrokerSettings, refuse_unsupported
from rmqkit.broker.unused_settings import UNUSED, UnusedSettings
from rmqkit.cli.servers import logging_setup
from rmqkit.cli.servers.logging_setup import LoggingSettings
from rmqkit.errors import SettingsError
from rmqkit.namesrv import settings as namesrv_keys
from rmqkit.namesrv.settings import NamesrvSettings
from rmqkit.remoting.authentication import AuthenticationSettings
from rmqkit.remoting.tls import ClientTlsSettings, ServerTlsSettings
from rmqkit.sentences import plain
from rmqkit.settings import SECRET, Configuration, Given
from rmqkit.store.settings import StoreSettings
from rmqkit.unused import Unused, unused_keys, unused_notes

PROMISES = {**broker_keys.PROMISES, **namesrv_keys.PROMISES}
WITHOUT_EFFECT = broker_keys.WITHOUT_EFFECT | namesrv_keys.WITHOUT_EFFECT
_SHARED: tuple[type[msgspec.Struct], ...] = (LoggingSettings, ServerTlsSettings, ClientTlsSettings)
BROKER: tuple[type[msgspec.Struct], ...] = (
    *(BrokerSettings, StoreSettings, AuthenticationSettings, UnusedSettings),
    *_SHARED,
)
NAMESRV: tuple[type[msgspec.Struct], ...] = (NamesrvSettings, AuthenticationSettings, *_SHARED)
_ENVIRONMENT = "RMQCONF_"

_log = logging.getLogger("rmqkit")

Config = Annotated[
    Path | None,
    typer.Option(
        "-c",
        "--config",
        help="Settings file, in the format of Java's broker.conf; JSON if it ends with .json.",
        show_default=False,
    ),
]
NameServers = Annotated[
    str | None,
    typer.Option(
        "-n",
        "--name-servers",
        help="Name servers, as host:port;host:port. (default: from the settings file, else NAMESRV_ADDR)",
        show_default=False,
    ),
]
StoreFolder = Annotated[Path | None, typer.Option(help="Directory for messages and state. (default: ~/store)")]
Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set any setting. You can repeat this option.")
]
_LogFormat = Annotated[
    str | None, typer.Option("--log-format", help="Format of log lines: text or json. (default: text)")
]
_PrintConfig = Annotated[
    bool,
    typer.Option(
        "-p", "--print-config", help="Print all settings with their sources and bounds, as a settings file, and exit."
    ),
]
COMMON: dict[str, tuple[Any, Any]] = {
    "config": (Config, None),
    "set_": (Set, None),
    "verbose": (
        Annotated[bool, typer.Option("-v", "--verbose", help="Log normal events too, not only warnings and errors.")],
        False,
    ),
    "log_file": (
        Annotated[str | None, typer.Option("--log-file", help="Write the log to this file. (default: stderr)")],
        None,
    ),
    "log_format": (_LogFormat, None),
    "print_config": (_PrintConfig, False),
    "as_json": (Annotated[bool, typer.Option("--json", help="With --print-config: print JSON.")], False),
}


def options_of(
    set_: Sequence[str] | None = None,
    verbose: bool = False,
    log_file: str | None = None,
    log_format: str | None = None,
    **values: object,
) -> dict[str, str]:
    """Return the settings of the command line; ``--set`` wins. Raises SettingsError: a text is not KEY=VALUE."""
    values |= {"logLevel": "INFO" if verbose else None, "logFile": log_file, "logFormat": log_format}
    options = {key: str(value) for key, value in values.items() if value is not None}
    for pair in set_ or ():
        key, sign, text = pair.partition("=")
        if not sign or not key:
            raise SettingsError(f"--set {pair} must be KEY=VALUE, as in broker.conf")
        options[key] = text
    return options


class Sources:
    """The settings of file, environment and command line; each `read` reads them again.

    Args:
        types: the known settings; other keys are logged and ignored, but refused on the command line.
        config: the file of ``-c``.
        options: the settings of the command line.
        without_effect: keys of Apache's servers that are accepted without effect.
        unused: keys of Apache's servers that have no effect, with the reasons.
        renamed: other names of settings, for settings that are not set under their own names.

    Attributes:
        file: the file that is read, and in which requests store their changes.
    """

    def __init__(
        self,
        types: Sequence[type[msgspec.Struct]],
        config: Path | None,
        options: Mapping[str, str],
        without_effect: frozenset[str] = WITHOUT_EFFECT,
        unused: Sequence[Unused] = UNUSED,
        renamed: Mapping[str, str] | None = None,
    ) -> None:
        self.unused = unused
        self._renamed = renamed or {}
        self._types = types
        self._without_effect = without_effect
        self._config = config
        self._options = dict(options)
        self._environment = {
            name.removeprefix(_ENVIRONMENT): Given(text, f"environment {name}")
            for name, text in sorted(os.environ.items())
            if name.startswith(_ENVIRONMENT)
        }
        self._keys = {key for one in types for key in configuration.setting_table(one)}
        self.file = config or self._kept_file()

    def read(self) -> tuple[dict[str, Given], list[str]]:
        """Return the settings with their sources, and notes about questionable settings.

        Raises SettingsError: a value, a file or a key of the command line is not valid.
        """
        given = self._given()
        for key in PROMISES.keys() & given.keys():
            text, source = given[key]
            refuse_unsupported({key: text}, source=source, promises={key: PROMISES[key]})
        accepted = self._without_effect | unused_keys(self.unused) | PROMISES.keys()
        loaded = configuration.load(self._types, given, without_effect=accepted)
        notes = []
        for key, nearest in loaded.unknown:
            hint = f", did you mean {nearest}?" if nearest else ""
            if key in self._options:
                raise SettingsError(f"--set {key}={self._options[key]}: unknown key{hint or '; see --print-config'}")
            notes.append(f"{given[key].source}: unknown key {key} is ignored{hint}")
        texts = {key: one.text for key, one in given.items() if key in self._keys}
        notes += [f"{self.file}: {note}" for note in unused_notes(self.unused, texts)]
        named = sorted(set(loaded.without_effect) - PROMISES.keys())
        if named:
            notes.append(f"{self.file}: without effect here: {', '.join(named)}")
        return given, notes

    def _given(self) -> dict[str, Given]:
        given = {}
        if "NAMESRV_ADDR" in os.environ and "namesrvAddr" in self._keys:
            given["namesrvAddr"] = Given(os.environ["NAMESRV_ADDR"], "environment NAMESRV_ADDR")
        if self._config is not None or self.file.exists():
            own = configuration.given_by_file(self.file)
            tls_file = own.pop("tls.config.file", None)
            configuration.load(self._types, own)  # a wrong value is an error, even if another value wins
            given |= (configuration.given_by_file(Path(tls_file.text)) if tls_file is not None else {}) | own
        given |= self._overrides()
        others = {own: given.pop(other) for other, own in self._renamed.items() if other in given}
        return others | given

    def _overrides(self) -> dict[str, Given]:
        return self._environment | {key: Given(text, "command line") for key, text in self._options.items()}

    def _kept_file(self) -> Path:
        """Return the file for changes without ``-c``, which is beside the server's own files."""
        chosen = {key: given.text for key, given in self._overrides().items()}
        if "storePathRootDir" in self._keys:
            root = chosen.get("storePathRootDir", StoreSettings().store_path_root_dir)
            return Path(root).expanduser().absolute() / "config" / "broker.conf"
        if "kvConfigPath" not in self._keys:
            return Path("~/rmq-proxy.conf").expanduser()
        return Path(chosen.get("kvConfigPath", "~/namesrv/kvConfig.json")).expanduser().with_name("namesrv.conf")


@dataclass(slots=True)
class Running:
    """The configurations of a process, with the forced values of each, and their sources."""

    sources: Sources
    configurations: list[Configuration]
    forced: list[Mapping[str, Given]]
    defaults: Mapping[str, Given] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        parts: Mapping[tuple[type[msgspec.Struct], ...], Mapping[str, Given]],
        *,
        config: Path | None,
        print_config: bool,
        as_json: bool,
        without_effect: frozenset[str] = WITHOUT_EFFECT,
        unused: Sequence[Unused] = UNUSED,
        renamed: Mapping[str, str] | None = None,
        defaults: Callable[[Mapping[str, Given]], Mapping[str, Given]] = lambda given: {},
        **options: Any,
    ) -> Running:
        """Return settings objects from all sources, and set up the log. With ``print_config``, only print the settings.

        ``defaults``: called with the given settings, returns values for settings that are not given.
        ``without_effect``, ``unused``, ``renamed``: see `Sources`.
        Raises SettingsError: a setting is not valid.
        """
        types = list(dict.fromkeys(one for part in parts for one in part))
        sources = Sources(types, config, options_of(**options), without_effect, unused, renamed)
        given, notes = sources.read()
        others = defaults(given)
        made = [Configuration.load(part, {**others, **given, **own}, file=sources.file) for part, own in parts.items()]
        running = cls(sources, made, list(parts.values()), others)
        logs = next(one for one in made[-1].settings if isinstance(one, LoggingSettings))
        if not print_config:
            logging_setup.set_up(logs)
        made[-1].listeners.append(lambda keys: logs.log_level.apply() if "logLevel" in keys else None)
        for note in notes:
            _log.warning("%s", note)
        if print_config:
            running.print(as_json=as_json)
            raise typer.Exit
        return running

    def reload(self) -> None:
        """Read all sources again (SIGHUP), change the hot settings, and log one line with all changed settings."""
        logging_setup.reopen()
        try:
            given, notes = self.sources.read()
            changes = [
                one.reload({**self.defaults, **given, **own})
                for one, own in zip(self.configurations, self.forced, strict=True)
            ]
        except SettingsError as error:
            _log.error("the settings were not changed: %s", error)
            return
        hot, cold = ([key for change in changes for key in change[at]] for at in (0, 1))
        later = f"; waiting for a restart: {', '.join(cold)}" if cold else ""
        _log.warning("%s was read again; changed: %s%s", self.sources.file, ", ".join(hot) or "nothing", later)
        for note in notes:
            _log.warning("%s", note)

    def print(self, *, as_json: bool) -> None:
        """Print every setting, sorted: its origin, bounds and meaning, then a line for a file. Settings without effect
        are only printed if they are given."""
        described = [row for one in self.configurations for row in one.described()]
        unused = unused_keys(self.sources.unused)
        shown = {row.key: row for row in described if row.key not in unused or row.source != "default"}
        rows = sorted(shown.items())
        if as_json:
            print(msgspec.json.format(msgspec.json.encode([row for _, row in rows], enc_hook=plain)).decode())
            return
        facts = [(row.source, row.bounds, "hot" if row.hot else "restart", row.help) for _, row in rows]
        widths = [max(len(fact[at]) for fact in facts) for at in range(3)]
        for (key, row), fact in zip(rows, facts, strict=True):
            print("# " + "  ".join([*(text.ljust(width) for text, width in zip(fact, widths, strict=False)), fact[3]]))
            print(
                f"# {key} is set and not shown"
                if row.value == SECRET
                else configuration.properties_line(key, row.value)
            )


def store_root(settings: StoreSettings) -> Path:
    """Return the absolute directory of ``storePathRootDir``."""
    return Path(settings.store_path_root_dir).expanduser().absolute()

"""Writes the reference pages that come out of the code: ``.venv/bin/python docs/generate.py``, also by ``make docs``.

`PAGES` has one function for each page; a test calls them all and compares. What a page says of a thing is said where
the thing is declared: settings in their `Setting`, commands in their options' help, names in their docstrings.
"""

from __future__ import annotations

import enum
import importlib
import logging
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import typer

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script, this folder alone is on the path
from docs.fields import bounds_text, choices_text, default_texts, fields_table, has_fields
from docs.fields import row as _row
from docs.served import codes_page

from rmqkit import errors, metrics
from rmqkit import settings as configuration
from rmqkit.broker.settings import PROMISES, WITHOUT_EFFECT, BrokerSettings
from rmqkit.broker.unused_settings import UNUSED
from rmqkit.cli import PANELS, app
from rmqkit.cli.servers.logging_setup import LoggingSettings
from rmqkit.client.runtime import settings as client
from rmqkit.console.request.routes import ROUTES
from rmqkit.metrics import ExporterSettings
from rmqkit.namesrv import settings as namesrv
from rmqkit.protocol.codes import ResponseCode
from rmqkit.proxy.remote.users import ProxyUserSettings
from rmqkit.proxy.server.server import ProxySettings
from rmqkit.proxy.server.unused_settings import RENAMED
from rmqkit.proxy.server.unused_settings import UNUSED as UNUSED_AT_PROXY
from rmqkit.remoting.authentication import AuthenticationSettings
from rmqkit.remoting.limits import ConnectionSettings
from rmqkit.remoting.tls import ClientTlsSettings, ServerTlsSettings
from rmqkit.spark import options as spark
from rmqkit.store.settings import StoreSettings
from rmqkit.testing import chaos, plugin
from rmqkit.unused import Unused, unused_keys

FOLDER = Path(__file__).parent
NOTE = "This page is generated: `make docs` writes it, and a test fails while it is out of date.\n"

# ---------------------------------------------------------------- settings

SETTINGS: dict[str, tuple[str, Sequence[type[msgspec.Struct]]]] = {
    "Broker": ("Set these in `broker.conf`.", (BrokerSettings,)),
    "Store": ("Set these in `broker.conf`, too.", (StoreSettings,)),
    "Name server": (
        "Set these in `namesrv.conf`. The file of `rmq standalone` can have settings of both servers.",
        (namesrv.NamesrvSettings,),
    ),
    "Proxy": ("For `rmq proxy`.", (ProxySettings, ProxyUserSettings)),
    "Log": ("For brokers and name servers.", (LoggingSettings,)),
    "Connections": ("For brokers and name servers. See [tuning](../how-to/tuning.md#limits).", (ConnectionSettings,)),
    "Metrics": ("For brokers and name servers. See [metrics](metrics.md).", (ExporterSettings,)),
    "TLS": (
        "For brokers and name servers. You can put them in a separate file; name it in `tls.config.file`.",
        (ServerTlsSettings, ClientTlsSettings),
    ),
    "Users": (
        "In `broker.conf`; in `namesrv.conf`, they apply to registrations of brokers.",
        (AuthenticationSettings,),
    ),
    "Every client": (
        "Fields of `ProducerSettings`, `PullConsumerSettings` and `PushConsumerSettings`.",
        (client.ClientSettings,),
    ),
    "Producers": ("`ProducerSettings`", (client.ProducerSettings,)),
    "Consumers": ("`PullConsumerSettings`, `PushConsumerSettings`", (client.ConsumerSettings,)),
    "Pull consumers": ("`PullConsumerSettings`", (client.PullConsumerSettings,)),
    "Push consumers": ("`PushConsumerSettings`", (client.PushConsumerSettings,)),
    "Spark: stores": ('Options of `spark.read.format("rocketmq-store")`.', (spark.StoreOptions,)),
    "Spark: topics": (
        'Options of `read` and `readStream` with `format("rocketmq")`; see [those of Kafka](../spark-options.md), too.',
        (spark.LiveOptions,),
    ),
    "Spark: writing": (
        'Options of `write` and `writeStream` with `format("rocketmq")`, in addition to those of producers.',
        (spark.SinkOptions,),
    ),
}
_SETTINGS_HEAD = f"""# Settings

Servers read settings files in the format of Java's RocketMQ, with the same keys. The command line (options such as
`--port`, and `--set KEY=VALUE`) has priority over the environment (`RMQCONF_KEY`), the environment over the file
(`-c`), and the file over the defaults. `--print-config` shows every setting with its value and source. In Python, set
the fields of a client: `ProducerSettings(send_timeout_ms=500)`. In Spark, use `option(...)`.

If a value is out of bounds, the server does not start. If a key is unknown, the server ignores it and logs a warning
with the most similar key. You can change settings marked *hot* while the server runs: with `rmq broker
config-set`, or in the file with SIGHUP ([how to](../how-to/configure.md)).

{NOTE}"""


def settings_page() -> str:
    """Every setting with its key, default and bounds."""
    parts = [_SETTINGS_HEAD]
    for title, (where, types) in SETTINGS.items():
        first = "Field | Key in Java" if types[0].__module__ == client.__name__ else "Key"
        parts.append(f"## {title}\n\n{where}\n\n| {first} | Default | Bounds | |\n{'|---' * (4 + first.count('|'))}|")
        parts += [row for settings_type in types for row in _setting_rows(settings_type, has_fields="|" in first)]
        parts.append("")
    parts += ["## Accepted without effect", "", _UNUSED_HEAD, *_unused_rows(UNUSED, must_stay=False), ""]
    parts.append(f"Also accepted: {_keys(_WITHOUT_EFFECT)}.\n")
    parts += ["## Settings with only one accepted value", "", _REFUSED_HEAD, *_unused_rows(UNUSED, must_stay=True), ""]
    parts.append(f"Also: {_keys(_PROMISES)}.\n")
    parts += ["## Settings of Apache's proxy", "", _PROXY_HEAD]
    parts += [_row(f"The same as `{own}`", f"`{other}`") for other, own in RENAMED.items()]
    parts += [*_unused_rows(UNUSED_AT_PROXY, must_stay=False), ""]
    return "\n".join(parts).rstrip() + "\n"


_UNUSED_HEAD = """\
rmqkit knows every setting of Apache's 5.5 broker. The following have no effect. You can show, change and
keep them like other settings. If you set one to a value other than Apache's default (shown here), the log names it.

| Reason | Keys |
|---|---|"""
_REFUSED_HEAD = """\
With another value, these settings would ask for something that rmqkit does not do. So another value is an
error, at the start and in a request.

| Reason | Keys |
|---|---|"""
_PROXY_HEAD = """\
`rmq proxy -c rmq-proxy.json` knows every setting of Apache's 5.5 proxy. Those that are not in the table
[Proxy](#proxy) are here. If you set one without effect to a value other than Apache's default, the log names it with
the reason.

| Reason | Keys |
|---|---|"""
_UNUSED_KEYS = unused_keys(UNUSED)
_WITHOUT_EFFECT = (WITHOUT_EFFECT | namesrv.WITHOUT_EFFECT) - _UNUSED_KEYS
_PROMISES = [f"{k}={'|'.join(v)}" for k, v in (PROMISES | namesrv.PROMISES).items() if k not in _UNUSED_KEYS]


def _setting_rows(settings_type: type[msgspec.Struct], *, has_fields: bool) -> Iterator[str]:
    """Rows of the fields that no base has with the same default; the base's table has those."""
    defaults = default_texts(settings_type)
    inherited = {pair for base in settings_type.__mro__[1:] for pair in _texts(base).items()}
    for key, (name, value_type, setting) in configuration.setting_table(settings_type).items():
        default = defaults[key]
        if (key, default) in inherited:
            continue
        names = (f"`{name}`", f"`{key}`") if has_fields else (f"`{key}`",)
        bounds = choices_text(value_type) or bounds_text(setting.low, setting.high)
        yield _row(
            *names, f"`{default}`" if default else "", bounds, setting.help + (" (*hot*)" if setting.hot else "")
        )


def _texts(base: type) -> dict[str, str]:
    has_table = issubclass(base, msgspec.Struct) and base.__module__.startswith("rmqkit.") and base.__name__[0] != "_"
    return default_texts(base) if has_table else {}


def _keys(keys: Iterable[str]) -> str:
    return ", ".join(f"`{key}`" for key in sorted(keys))


def _unused_rows(groups: Iterable[Unused], *, must_stay: bool) -> Iterator[str]:
    for group in groups:
        if group.must_stay == must_stay:
            yield _row(group.reason, _keys(group.settings.split()))


# ---------------------------------------------------------------- metrics

_METRICS_HEAD = f"""# Metrics

A broker, a name server or `rmq proxy` with `metricsExporterType=PROM` exports these metrics to Prometheus, on port
`metricsPromExporterPort` ([how to](../how-to/metrics.md)). Metrics that begin with `rocketmq_` have the same names,
labels, units and buckets as Apache's, so dashboards for Apache's broker work. Metrics that begin with `rmqkit_` are
additional.

{NOTE}"""


def metrics_page() -> str:
    """Yield every metric of the table; metrics without a source come last."""
    parts = [_METRICS_HEAD, "## Labels of all metrics\n", f"| Label | |\n{'|---' * 2}|"]
    parts += [_row(f"`{label}`", meaning) for label, meaning in metrics.COMMON.items()]
    sides = {"All servers": metrics.Server.ALL, "Broker and name server": metrics.Server.BOTH}
    sides |= {"Broker": metrics.Server.BROKER, "Name server": metrics.Server.NAME_SERVER}
    for title, servers in (sides | {"Proxy": metrics.Server.PROXY}).items():
        parts.append(f"\n## {title}\n\n| Metric | Kind | Labels | Meaning |\n{'|---' * 4}|")
        parts += [_metric(one, one.help) for one in metrics.TABLE if one.servers is servers and not one.absent]
    parts.append(
        f"\n## Metrics of Apache's broker that rmqkit does not have\n\n| Metric | Kind | Labels | Why |\n{'|---' * 4}|"
    )
    parts += [_metric(one, one.absent) for one in metrics.TABLE if one.absent]
    return "\n".join(parts) + "\n"


def _metric(one: metrics.Metric, meaning: str) -> str:
    return _row(f"`{one.exposed_name}`", one.kind.value, ", ".join(f"`{label}`" for label in one.labels), meaning)


# ---------------------------------------------------------------- command line

_CLI_HEAD = f"""# The `rmq` command

This page lists all commands with their arguments and options. `rmq COMMAND --help` shows the same. All commands use the
same [exit codes](exit-codes.md). `rmq --install-completion` sets up completion in your shell.

{NOTE}"""


_CONNECTION = "Connection and output"
_OPTION_COLUMNS = f"| Argument or option | Value | Default | |\n{'|---' * 4}|"


def cli_page() -> str:
    """Return the tree of commands. The options of all commands that connect are listed once."""
    root: Any = typer.main.get_command(app)
    shared: dict[str, str] = {}
    groups = [_row(f"**{panel}**", ", ".join(f"[{name}](#rmq-{name})" for name in PANELS[panel])) for panel in PANELS]
    tree = list(_command(root, typer.Context(root, info_name="rmq"), "rmq", shared))
    tree[1:1] = [f"| Group | Commands |\n{'|---' * 2}|", *groups, ""]
    common = [
        f"## {_CONNECTION}\n",
        "All commands that connect to servers have these options.\n",
        _OPTION_COLUMNS,
        *shared.values(),
        "",
    ]
    return "\n".join([_CLI_HEAD, *tree, *common]).rstrip() + "\n"


def _command(command: Any, context: typer.Context, path: str, shared: dict[str, str]) -> Iterator[str]:
    depth = min(path.count(" ") + 1, 4)
    if depth > 1:
        yield f"{'#' * depth} {path}\n"
    yield (command.help or "").split("\f")[0].strip() + "\n"
    own, connects = [], False
    for parameter in command.params:
        row = "" if getattr(parameter, "hidden", False) else _parameter(parameter, context)
        if getattr(parameter, "rich_help_panel", None) == _CONNECTION:
            connects = True
            shared.setdefault(parameter.name, row)
        elif row:
            own.append(row)
    if own:
        yield from (_OPTION_COLUMNS, *own, "")
    if connects:
        yield f"Also [{_CONNECTION.lower()}](#connection-and-output).\n"
    if path == "rmq admin":  # the verbs of the nouns, which are listed under their own names
        yield "[A table](mqadmin.md) shows the noun and verb of each.\n"
        return
    for name in command.list_commands(context) if hasattr(command, "list_commands") else ():
        below = command.get_command(context, name)
        if below is not None and not below.hidden:
            yield from _command(below, typer.Context(below, info_name=name, parent=context), f"{path} {name}", shared)


def _parameter(parameter: Any, context: typer.Context) -> str:
    if parameter.name == "help":
        return ""
    is_option = parameter.param_type_name == "option"
    names = [*parameter.opts, *parameter.secondary_opts] if is_option else [parameter.make_metavar(context)]
    value = "" if getattr(parameter, "is_flag", False) else _value(parameter, context) if is_option else ""
    default = parameter.get_default(context, call=False)
    is_told = not is_option or callable(default) or "default:" in (parameter.help or "")
    shown = "" if is_told or default in (None, False, "", (), []) else f"`{getattr(default, 'value', default)}`"
    environment = f" Environment: `{parameter.envvar}`." if getattr(parameter, "envvar", None) else ""
    return _row(", ".join(f"`{name}`" for name in names), value, shown, (parameter.help or "") + environment)


def _value(parameter: Any, context: typer.Context) -> str:
    choices = getattr(parameter.type, "choices", None)
    if choices:
        return ", ".join(f"`{getattr(choice, 'value', choice)}`" for choice in choices)
    low, high = getattr(parameter.type, "min", None), getattr(parameter.type, "max", None)
    if low is not None or high is not None:
        return bounds_text(low, high)
    return f"`{parameter.make_metavar(context).strip('[]<>')}`"


# ---------------------------------------------------------------- exit codes

_EXIT_HEAD = f"""# Exit codes

Every `rmq` command ends with one of these exit codes. An error is one line on standard error. It says what the command
tried, what it found, and what you can do. With `--json`, the line is an object with `error`, `kind` and `exitCode`.
`rmq --debug COMMAND` also shows the traceback.

{NOTE}"""


def exit_codes_page() -> str:
    """The table at the top of `rmqkit.errors`, and which errors end with which code."""
    rows = [_row(f"`{code}`", meaning, _errors_of(int(code))) for code, meaning in _table_of(errors)]
    return "\n".join([_EXIT_HEAD, f"| Code | Meaning | Raised as |\n{'|---' * 3}|", *rows]) + "\n"


def _table_of(module: ModuleType) -> list[tuple[str, str]]:
    """The rows of the table of two columns in a module's docstring."""
    _, _, body, _ = re.split(r"^=+  =+\n", (module.__doc__ or "") + "\n", maxsplit=3, flags=re.MULTILINE)
    at = re.search(r"^=+  ", module.__doc__ or "", re.MULTILINE)
    assert at is not None, f"{module.__name__} has no table"
    rows: list[tuple[str, str]] = []
    for line in body.splitlines():
        first, second = line[: len(at[0])].strip(), line[len(at[0]) :].strip()
        if first:
            rows.append((first.replace("``", "`"), second.replace("``", "`")))
        elif rows:
            rows[-1] = (rows[-1][0], f"{rows[-1][1]} {second.replace('``', '`')}")
    return rows


def _errors_of(code: int) -> str:
    classes = [(one, errors.ExitCode.FAILED) for one in (errors.RmqError,)] + list(errors._BY_CLASS)
    names = [f"`{one.__name__}`" for one, found in classes if found == code]
    responses = ", ".join(
        f"{number} {ResponseCode(number).name}" for number, found in errors._BY_RESPONSE.items() if found == code
    )
    return "; ".join(filter(None, (", ".join(names), f"response codes {responses}" if responses else "")))


# ---------------------------------------------------------------- Python

ADMIN = (
    "cluster.clusters cluster.topics cluster.brokers cluster.groups messages.messages cluster.clients replay.dead"
    " cluster.access explain diagnosis.causes diagnosis.timeline diagnosis.health diagnosis.survey messages.listing"
    " cluster.settings"
).split()
API: dict[str, tuple[str, str, Sequence[str]]] = {
    "rmqkit": (
        "Clients",
        """Import these names from `rmqkit`: `from rmqkit import Message, Producer`.

`rmqkit.sync` has the same clients [for programs without an event loop](sync.md). The page on [settings](../settings.md)
lists the settings of servers, too.""",
        ("rmqkit",),
    ),
    "sync": (
        "Clients without an event loop, selectors, allocation",
        "`from rmqkit import sync, selectors, allocate`",
        ("rmqkit.sync", "rmqkit.client.producer.selectors", "rmqkit.client.consumer.allocate"),
    ),
    "streams": (
        "Streams and server-sent events",
        "`rmqkit.streams` and `from rmqkit.sse import EventStreamResponse`; see [streams](../../how-to/streams.md).",
        ("rmqkit.streams", "rmqkit.sse"),
    ),
    "spark": (
        "Spark",
        "`from rmqkit.spark import spark_session`. The jobs are functions that take a session and the path of a store.",
        (
            "rmqkit.spark",
            *(
                f"rmqkit.spark.jobs.{job}"
                for job in "summary audit diff verify rebuild query archive replay typed_table".split()
            ),
        ),
    ),
    "arrow": (
        "Stores as tables",
        "`from rmqkit.arrow import scan, dataset`; see [query a store](../../how-to/query-a-store.md).",
        ("rmqkit.arrow", "rmqkit.arrow.query"),
    ),
    "admin": (
        "Administration",
        "`from rmqkit.admin import Admin`. Its coroutines do what `rmq topic list` and so on do, and return structs.",
        ("rmqkit.admin", *(f"rmqkit.admin.{module}" for module in ADMIN)),
    ),
    "console": (
        "Web console",
        "The console as an ASGI app, and what other packages may add to it; see [the guide](../../how-to/console.md).",
        ("rmqkit.console", "rmqkit.console.hooks"),
    ),
    "testing": ("Testing", "The pytest plugin, and the classes that it uses.", ("rmqkit.testing",)),
    "errors": ("Errors", "All exceptions of rmqkit.", ("rmqkit.errors",)),
}


GROUPS: dict[str, Sequence[str]] = {
    "Producers": "Producer TransactionProducer SendResult SendStatus TransactionResult TransactionState".split(),
    "Consumers": (
        "PushConsumer PullConsumer PopConsumer ConsumeLater Reject Retry PullResult PullStatus Reply run"
        " SqliteDedupe RedisDedupe"
    ).split(),
    "Messages": "Message ReceivedMessage MessageQueue".split(),
    "Settings": (
        "ProducerSettings PushConsumerSettings PullConsumerSettings ClientSettings"
        " Tls Credentials Tracing Batching Compressing SendLimits HoldLimits Pulling Popping"
        " StartFrom MessageModel CompressionType"
    ).split(),
    "Modules and connections": "connect ConnectedClients sync selectors allocate ClientRuntime".split(),
    "Status": "ProducerStatus BrokerStatus MemberStatus QueueStatus QueueState".split(),
    "Hooks": "Hook Sending SendOutcome Consumption ConsumeOutcome TransactionEnd Recall".split(),
    "Errors": (
        "RmqError ClientError SendFailed SendManyFailed MessageIllegal NoRoute NotARequest ReplyTimedOut SettingsError"
        " TimeIllegal RemotingError ConnectFailed ConnectionLost RequestTimedOut PeerRefused BodyMismatch"
    ).split(),
}
"""The order of the names of `rmqkit` on their page; what is in no group comes at the end."""


def api_page(title: str, what: str, modules: Sequence[str]) -> str:
    """Directives for the public names of some modules, behind each the table of its fields. Docstrings come in when the
    site is built; an overview of what there is can be read without it."""
    parts = [f"# {title}\n\n{NOTE}\n{what}\n"]
    for module in modules:
        homes = public_names(module)
        if module == "rmqkit":
            grouped = {name for names in GROUPS.values() for name in names}
            groups = {**GROUPS, "More": [name for name in homes if name not in grouped]}
        else:
            groups = {f"`{module}`" if len(modules) > 1 else "": list(homes)}
        for group, names in groups.items():
            if names:
                parts += [f"## {group}\n"] if group else []
                parts += [*_overview(module, {name: homes[name] for name in names}), ""]
                parts += [line for name in names for line in _entry(module, name, homes[name], 3 if group else 2)]
    return "\n".join(parts)


def _overview(module: str, homes: dict[str, str]) -> Iterator[str]:
    yield f"| Name | What it is | Methods |\n{'|---' * 3}|"
    for name, home in homes.items():
        value = getattr(importlib.import_module(module), name)
        methods = [one for one in vars_of(value) if not one.startswith("_")]
        yield _row(f"[`{name}`](#{home})", _first_sentence(value), ", ".join(f"`{one}`" for one in methods))


def vars_of(value: object) -> list[str]:
    """The methods of a class, its own first, those of base classes of ours behind them."""
    if not isinstance(value, type) or has_fields(value) or issubclass(value, BaseException):
        return []
    bases = [base for base in value.__mro__ if base.__module__.startswith("rmqkit.")]
    found = [name for base in bases for name, one in vars(base).items() if callable(one)]
    return list(dict.fromkeys(found))


def _first_sentence(value: object) -> str:
    """Return the first sentence of a docstring, or an empty text for a value without a docstring of its own."""
    if not (isinstance(value, type | ModuleType) or callable(value)):
        return ""
    text = " ".join((getattr(value, "__doc__", None) or "").split("\n\n")[0].split())
    return re.sub(r"(\.|::?)( .*|)$", r".", text, count=1).replace("``", "`") if text else ""


def _entry(module: str, name: str, home: str, level: int) -> Iterator[str]:
    value = getattr(importlib.import_module(module), name)
    options = {"heading_level": str(level)} if level != 2 else {}
    if isinstance(value, type) and issubclass(value, enum.Enum):
        options["members"] = "false"
    yield f"::: {home}"
    if options:
        yield "    options:"
        yield from (f"      {key}: {text}" for key, text in options.items())
    yield ""
    if has_fields(value):
        lines = list(fields_table(value))
        yield from (*lines, "") if lines else ()


def testing_page() -> str:
    """The fixtures and the dials, from the tables where they are declared, then the classes."""
    title, what, modules = API["testing"]
    for heading, column, module in (("Fixtures", "Fixture", plugin), ("Chaos dials", "Dial", chaos)):
        rows = "\n".join(_row(*row) for row in _table_of(module))
        what += f"\n\n## {heading}\n\n| {column} | |\n|---|---|\n{rows}"
    return api_page(title, what, modules)


def public_names(module_name: str) -> dict[str, str]:
    """The names a module offers → where each is defined."""
    module = importlib.import_module(module_name)
    names = {}
    for name in module.__all__:
        value = getattr(module, name)
        home = getattr(value, "__module__", None)
        is_defined_there = home is not None and hasattr(sys.modules.get(home), name)
        names[name] = (
            value.__name__
            if hasattr(value, "__path__") or type(value) is type(sys)
            else (f"{home}.{name}" if is_defined_there else f"{module_name}.{name}")
        )
    return names


# ---------------------------------------------------------------- addresses of the web console

_CONSOLE_HEAD = f"""# Addresses of the web console

Every page of [the console](../how-to/console.md). `{{env}}` is the name of a cluster, `local` where there is one
without a name. Names are percent-encoded: `%25DLQ%25billing` is the topic `%DLQ%billing`. `?format=json` gives a page's
values as JSON.

{NOTE}
| Address | Refreshes | |
|---|---|---|"""


def console_page() -> str:
    """Every route, with what it shows."""
    rows = [
        f"| `{route.path}` | {f'{route.live_s:g} s' if route.live_s else ''} | "
        f"{route.about}{' Takes forms.' if route.posts else ''} |"
        for route in ROUTES
    ]
    return "\n".join([_CONSOLE_HEAD, *rows]) + "\n"


# ---------------------------------------------------------------- all

PAGES: dict[str, Callable[[], str]] = {
    "reference/settings.md": settings_page,
    "reference/codes.md": codes_page,
    "reference/cli.md": cli_page,
    "reference/metrics.md": metrics_page,
    "reference/exit-codes.md": exit_codes_page,
    "reference/console.md": console_page,
    **{f"reference/api/{name}.md": lambda parts=parts: api_page(*parts) for name, parts in API.items()},  # type: ignore[misc]
    "reference/api/testing.md": testing_page,
}


def main() -> None:
    logging.disable()
    for name, page in PAGES.items():
        path, text = FOLDER / name, page()
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path.relative_to(FOLDER.parent)}")


if __name__ == "__main__":
    main()

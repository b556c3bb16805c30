"""Commands and settings that errors, pages and help texts name: each command parses, and each setting exists.

Texts are taken from the source: strings other than docstrings, the docstrings of commands (their help), and templates.
A value in an f-string, or of the console's ``shell``, is replaced by a word that every option accepts. The text from
``rmq`` up to a mark such as a semicolon must be

=======  ==================================================================================================
remedy   a whole command without placeholders that its own checks accept: people paste it
page     a whole command; a page of the console writes TOPIC if a form is still empty
help     a command, or its name alone, followed by words of the sentence
=======  ==================================================================================================
"""

from __future__ import annotations

import ast
import contextlib
import functools
import io
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import typer

from rmqkit.cli import NOUNS, app, noun_group
from rmqkit.cli.frame import nouns
from rmqkit.cli.messages import replay as replaying
from rmqkit.client.runtime.settings import Compressing, SendLimits
from rmqkit.errors import REMARKS, REMEDIES
from rmqkit.settings import setting_table
from tests.client.peers import standalone
from tests.sources import FOLDERS, modules, place

VALUE = "7"
"""The replacement of a value: valid as a number, a name, and a time."""
ENDS = re.compile(r"[`\";,()·\n]|(?<! )'|: | \| |\. |\.$|:$| {2}")
NOT_COMMANDS = (
    "rmq chaos",
    "rmq command ",
    "rmq and ",
    f"rmq waiting {VALUE}",
    f"rmq pipeline {VALUE}",
    "rmq bench needs",
)
"""Texts that begin like a command but are none."""
USAGE = next(one for one in typer.BadParameter.__mro__ if one.__name__ == "ClickException")
"""The base class of the parser's errors. Its module depends on the version of typer."""
NAMED_PLACES = re.compile(r"\{\w+(?:![rs])?(?::[^{}]*)?\}|%[sd]")
"""Placeholders of translated sentences, of texts that are formatted later, and of log lines."""
UNKNOWN = {"MASTERS_STORE"}
"""Placeholders that the program cannot fill in: the directory is on another machine."""


def texts_of(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the texts of a module or of a template, each with its kind."""
    if path.suffix == ".html":
        text = path.read_text()
        for call in re.findall(r"shell\([^()]*\)", text):
            yield from _strings(ast.parse(call), "page")
            text = text.replace(call, "")
        yield from (("page", one) for one in re.findall(r'"(rmq [^"]*)"', text))
        found = re.findall(r"<code>(rmq .*?)</code>", text)
        yield from (("page", re.sub(r"\{\{.*?\}\}", VALUE, one)) for one in found)
        return
    source = path.read_text()
    if not re.search(r"rmq\b", source):  # every process of a test run reads all modules, and parsing them takes 4 s
        return
    tree = ast.parse(source)
    if "cli" in path.parts:
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.decorator_list:
                yield "help", ast.get_docstring(node) or ""
    yield from _strings(tree, "page" if "views" in path.parts else "remedy")


def _strings(tree: ast.AST, kind: str) -> Iterator[tuple[str, str]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "shell":
            yield kind, " ".join(word for one in node.args for word in _words(one))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield kind, NAMED_PLACES.sub(VALUE, node.value)
        elif isinstance(node, ast.JoinedStr):
            yield kind, "".join(one.value if isinstance(one, ast.Constant) else VALUE for one in node.values)
            for one in node.values:
                if isinstance(one, ast.FormattedValue):
                    yield from _strings(one, kind)
        else:
            yield from _strings(node, "help" if isinstance(node, ast.keyword) and node.arg == "help" else kind)


def _words(node: ast.expr) -> list[str]:
    """Return the words that an argument of ``shell`` adds to a command. For a conditional expression, use the first
    branch.
    """
    match node:
        case ast.Constant():
            return [str(node.value)]
        case ast.Starred(value=ast.IfExp(body=ast.Tuple(elts=words) | ast.List(elts=words))):
            return [word for one in words for word in _words(one)]
        case ast.Starred():
            return []
    return [VALUE]


@pytest.fixture(scope="module")
def commands() -> list[tuple[str, str, str]]:
    """Return each text that names a command: its kind, its file and the command."""
    return sorted(set(_commands()))


def _commands() -> Iterator[tuple[str, str, str]]:
    for path in (*modules(), *sorted((FOLDERS["rmqkit-tools"] / "console" / "html" / "templates").glob("*.html"))):
        for kind, text in texts_of(path):
            for found in re.finditer(r"(?<![\w./=-])rmq (?=[a-z])", text):
                words = text[found.start() :]
                if not words.startswith(NOT_COMMANDS):
                    yield kind, str(place(path)), " ".join(ENDS.split(words, maxsplit=1)[0].split())


@functools.cache
def root() -> Any:
    return typer.main.get_command(app)


@functools.cache
def verbs(noun: str) -> set[str]:
    return set(noun_group(noun).list_commands(None)) if noun in NOUNS else set()


def accepts(words: list[str]) -> bool:
    """Return True if the command line accepts these words: its parser, and the checks before a request is sent."""
    ran: list[Any] = []

    def note(*given: Any, **_: Any) -> bool:
        ran.append(given)
        return True

    context, command, rest = typer.Context(root(), info_name="rmq"), root(), list(words)
    try:
        while hasattr(command, "resolve_command"):
            if not rest:
                return True  # a noun
            if rest[0].startswith("-") and context.parent is not None:
                break  # the options of a server, which is also the name of a command group
            name, found, rest = command.resolve_command(context, rest)
            context, command = typer.Context(found, info_name=name, parent=context), found
        made = command.make_context(context.info_name, rest, parent=context.parent)
        if words[0] == "replay" or command.name in verbs(words[0]):
            with (
                mock.patch.object(nouns, "_run", note),
                mock.patch.object(replaying, "run", note),
                contextlib.redirect_stdout(io.StringIO()),
            ):
                made.command.invoke(made)
            return bool(ran)
    except (USAGE, typer.Exit) as error:
        return isinstance(error, typer.Exit) and error.exit_code == 0
    return True


def is_leaf(words: list[str], *, has_more: bool = False) -> bool:
    """Return True if the words name a command, followed only by names of its options. ``has_more`` allows any words to
    follow.
    """
    command, context = root(), typer.Context(root(), info_name="rmq")
    rest = list(words)
    while hasattr(command, "get_command"):
        found = command.get_command(context, rest[0]) if rest else None
        if found is None:
            return False
        context, command = typer.Context(found, info_name=rest.pop(0), parent=context), found
    return has_more or set(rest) <= {name for one in command.get_params(context) for name in one.opts}


def longest(words: list[str]) -> list[str]:
    """Return the longest prefix of the words that is a command."""
    for end in range(len(words), 0, -1):
        # The name of a command group counts as a command only if no possible subcommand follows.
        if (end == len(words) or is_leaf(words[:end], has_more=True)) and accepts(words[:end]):
            return words[:end]
    return []


def split(text: str) -> list[str]:
    """Split a command into words as a shell does, if possible."""
    try:
        words = shlex.split(text)[1:]
    except ValueError:
        words = text.split()[1:]
    return [word.rstrip(".,:") for word in words]


def filled(words: list[str]) -> list[str]:
    return [VALUE if word.isupper() or word == "…" else word for word in words]


def remedy_fault(where: str, text: str) -> str:
    """Return why the command of a remedy cannot be pasted, or an empty string."""
    words = split(text)
    if not accepts(filled(words)):
        return "is no whole command"
    if not {word for word in words if word.isupper()} <= UNKNOWN:
        return "has a placeholder"
    return "has mqadmin's name" if words[0] == "admin" else ""


def page_fault(where: str, text: str) -> str:
    return "" if accepts(filled(split(text))) else "is no whole command"


def help_fault(where: str, text: str) -> str:
    """Return why a help text names no command, or an empty string."""
    words = filled(split(text))
    found = longest(words) or next((words[:end] for end in (4, 3, 2, 1) if is_leaf(words[:end])), [])
    rest = words[len(found) :]
    if not found:
        return "is no command"
    if any(word.startswith("-") for word in rest):
        return f"has unknown options: {rest}"
    return "has mqadmin's name" if found[0] == "admin" and where != "cli/admin/mqadmin.py" else ""


FAULTS = {"remedy": remedy_fault, "page": page_fault, "help": help_fault}


@pytest.mark.parametrize(("kind", "count"), [("remedy", 40), ("page", 40), ("help", 5)])
def test_a_command_that_a_text_names_can_be_run(kind: str, count: int, commands: list[tuple[str, str, str]]) -> None:
    """Remedies and pages show whole commands, to be pasted. Help texts name commands alone."""
    found = [(where, text) for its_kind, where, text in commands if its_kind == kind]
    assert len(found) > count
    faults = [f"{where}: {text!r} {fault}" for where, text in found if (fault := FAULTS[kind](where, text))]
    assert faults == [], "\n".join(faults)


def test_wrong_commands_are_not_accepted() -> None:
    assert remedy_fault("errors.py", "rmq replay --dlq GROUP") == "has a placeholder"
    assert remedy_fault("errors.py", "rmq replay") == "is no whole command"
    assert page_fault("a.html", "rmq dead sorts g") == "is no whole command"
    assert help_fault("errors.py", "rmq dead sorts") == "is no command"
    assert help_fault("errors.py", "rmq consumer status g --never") == "has unknown options: ['--never']"
    assert not accepts(["store", "rebuild", "--index"]) and not accepts(["profile", "add"])
    assert longest(["replay"]) == []
    assert longest(["replay", "--dlq", "g"]) == ["replay", "--dlq", "g"]
    assert longest(["consumer", "status"]) == []
    assert longest(["consumer", "status", "g", "please"]) == ["consumer", "status", "g"]
    assert longest(["dead", "sorts"]) == []
    assert longest(["send", "T", "body", "--tag", "x"]) == ["send", "T", "body"]


# -- settings


def settings() -> set[str]:
    """Return the keys of all settings of servers and clients."""
    from rmqkit.cli.servers.sources import BROKER, NAMESRV
    from rmqkit.client.runtime.settings import ProducerSettings, PullConsumerSettings, PushConsumerSettings

    clients = (ProducerSettings, PullConsumerSettings, PushConsumerSettings)
    return {key for one in (*BROKER, *NAMESRV, *clients) for key in setting_table(one)}


REMEDY_TEXTS = [*REMEDIES.values(), *(text for table in REMARKS.values() for text in table.values())]


@pytest.mark.parametrize("text", [text for text in REMEDY_TEXTS if re.search("[a-z][A-Z]", text)])
def test_a_setting_that_a_remedy_names_exists(text: str) -> None:
    named = set(re.findall(r"\b[a-z]+[A-Z]\w+", text))
    assert named <= settings(), named - settings()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("timerMaxDelaySec", "99999999", {"delay": 30 * 86_400}),
        ("maxMessageSize", "8388608", {"body": bytes(5 << 20)}),
    ],
)
def test_the_setting_that_a_remedy_names_is_the_one_that_counts(
    tmp_path: Path, key: str, value: str, message: dict[str, Any]
) -> None:
    """The error names the setting; with another value of the setting there is no error."""
    from rmqkit import sync
    from rmqkit.client.runtime.settings import ProducerSettings
    from rmqkit.errors import PeerRefused
    from rmqkit.protocol.message import Message
    from tests.cli.in_process import rmq

    with standalone(tmp_path) as address:
        large = ProducerSettings(
            limits=SendLimits(message_bytes_max=8 << 20), compression=Compressing(body_bytes_min=16 << 20)
        )
        with sync.Producer("shop", address, settings=large) as producer:
            sent = Message(**{"topic": "Orders", "body": b"x", **message})
            with pytest.raises(PeerRefused, match=key) as caught:
                producer.send(sent)
            others = {"timerMaxDelaySec", "maxMessageSize"} - {key}
            assert not any(other in str(caught.value) for other in others)
            broker = rmq("cluster", "list", "-n", address, "--json")
            name = re.search(r'"brokerName":"([^"]*)"', broker.stdout)
            assert name is not None, broker
            done = rmq("broker", "config-set", "-b", name[1], key, value, "-n", address)
            assert done.returncode == 0, done
            assert producer.send(sent).msg_id

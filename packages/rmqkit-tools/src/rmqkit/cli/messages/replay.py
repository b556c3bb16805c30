"""``rmq replay``: send stored messages again."""

from __future__ import annotations

import os
import shlex
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from rmqkit.admin import Admin
from rmqkit.admin.messages.sending import Stop
from rmqkit.admin.replay.dead import BY, Kinds
from rmqkit.admin.replay.memory import file_name
from rmqkit.admin.replay.replay import Plan, Replay, opened
from rmqkit.admin.replay.retries import Retries, other_readers
from rmqkit.admin.replay.selection import Selection, destination
from rmqkit.cli import with_options
from rmqkit.cli.admin.message import shown
from rmqkit.cli.frame.connected import (
    Tally,
    client_settings,
    note,
    note_wait,
    run,
    runtime_for,
    sending_settings,
)
from rmqkit.cli.frame.nouns import COMMON, LIVE_TOPICS, admin_of, show
from rmqkit.cli.frame.printing import body_text, time_ms, time_text
from rmqkit.cli.servers.store import Config, settings_of
from rmqkit.client.runtime.settings import PullConsumerSettings
from rmqkit.errors import ExitCode, RmqError, SettingsError, UnknownName
from rmqkit.protocol.names import TOOLS_GROUP, dlq_topic
from rmqkit.sentences import plain

app = typer.Typer(name="replay", add_completion=False)

_ROWS_MAX = 20
_SECONDS = len("2026-01-31 12:00:00")
_BODY_CHARS = 28
_CANDIDATES_MAX = 5


# Long: it declares the command's options.
@app.command()
@with_options(COMMON)
def replay(
    topic: Annotated[
        str | None, typer.Argument(metavar="[TOPIC]", help="Topic to read messages from.", autocompletion=LIVE_TOPICS)
    ] = None,
    dlq: Annotated[
        str | None,
        typer.Option(
            "--dlq", metavar="GROUP", help="Read the dead letters of this group instead of a topic.", show_default=False
        ),
    ] = None,
    store: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Read the log of this store directory.", show_default=False)
    ] = None,
    config: Config = None,
    target: Annotated[
        str | None,
        typer.Option(
            "--to",
            metavar="TOPIC",
            help="Topic to send to; every group that reads it gets the messages. (default with --dlq: the retry topic "
            "of the group, which no other group reads; with --store: the original topic of each message)",
        ),
    ] = None,
    begin: Annotated[
        str | None,
        typer.Option("--from", metavar="TIME", help="Only messages stored at or after this time: ISO or ms."),
    ] = None,
    end: Annotated[
        str | None, typer.Option("--until", metavar="TIME", help="Only messages stored at or before this time.")
    ] = None,
    keys: Annotated[
        list[str] | None, typer.Option("--key", help="Only messages with this key or message id; repeatable.")
    ] = None,
    tags: Annotated[str, typer.Option(help='Only messages with these tags: "a || b".', show_default=False)] = "*",
    sql: Annotated[str, typer.Option(help="Only messages that match this SQL92 expression.", show_default=False)] = "",
    kinds: Annotated[
        list[str] | None,
        typer.Option(
            "--kind",
            metavar="NO|TEXT",
            help="Only messages of this kind: its number in rmq dead kinds, or a part of its name; repeatable.",
        ),
    ] = None,
    by: Annotated[str, typer.Option(help=f"Group dead letters by: {', '.join(BY)} or property:NAME.")] = "kind",
    rate: Annotated[float, typer.Option(min=0, help="Maximum messages per second; 0 means no limit.")] = 0,
    is_dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be sent, but send nothing.")] = False,
    state_path: Annotated[
        Path | None,
        typer.Option(
            "--state",
            metavar="FILE",
            help="Save progress to this file. Run the same command again to continue. (default with --dlq: a file in "
            "~/.local/state/rmqkit, which records the replayed messages)",
        ),
    ] = None,
    is_again: Annotated[
        bool, typer.Option("--again", help="With --dlq: discard the record of replays and send all again.")
    ] = False,
    audit_path: Annotated[
        Path | None, typer.Option("--audit", metavar="FILE", help="Append one JSON line per message to this file.")
    ] = None,
    group: Annotated[
        str, typer.Option(help="Consumer group for the requests. No offsets are saved for it.")
    ] = TOOLS_GROUP,
    **options: Any,
) -> None:
    """Send stored messages again: from a topic, from the dead letters of a group, or from a store directory.

    Dead letters go only to the group they belong to. Each of them is replayed
    once; --again replays all of them again.

    Only messages stored before the command starts are sent. With --state or
    --dlq, you can interrupt the replay at any time and continue it later. The
    interrupted chunk has at most 256 messages. Messages of it that arrived are
    recognized by their unique keys and are not sent again."""
    topic = _topic(topic, dlq, store, target, is_again=is_again)
    end_ms = None if end is None else time_ms(end)
    selection = Selection(topic, time_ms(begin or "0"), end_ms, tuple(keys or ()), tags, sql, by)
    selection.test()
    where = target or (f"group {dlq}" if dlq is not None else "their own topics")
    memory = None
    if dlq is not None and store is None:
        state_path = state_path or _memory_path(dlq, target, options)
        memory = state_path, f"dead letters of {dlq}, to {where}"
    as_json = options["as_json"]
    tally = Tally("replaying", None, is_shown=not as_json)
    job: Replay | None = None

    async def work(stop: Stop) -> None:
        nonlocal job
        known = topic if store is None else target
        async with runtime_for(known, options, must_exist=store is None) as runtime, admin_of(options) as admin:
            chosen = await _with_kinds(admin, selection, None if store is not None else dlq, kinds or [])
            plan = Plan(
                task=f"{store or 'brokers'}, {chosen}, to {where}",
                selection=chosen,
                group=dlq,
                target=target,
                store=store,
                store_settings=None if store is None else settings_of(config, store),
                memory=memory,
                is_again=is_again,
                state=state_path if memory is None else None,
                audit=audit_path,
                rate=rate,
                is_dry_run=is_dry_run,
            )
            async with opened(
                plan,
                runtime,
                admin,
                reading=client_settings(PullConsumerSettings, options),
                sending=sending_settings(options, message_bytes_max=sys.maxsize),
                group=group,
                on_chunk=tally.add,
                on_wait=note_wait,
                on_damage=lambda finding: note(str(finding)),
            ) as found:
                readers = await _readers(admin, target, dlq, found.retries)
                if is_dry_run:
                    await _show(found, as_json=as_json)
                for line in readers:
                    note(line)
                if is_dry_run:
                    return
                if store is None and chosen == Selection(topic, chosen.begin_ms):
                    tally.total = found.state.left
                job = found
                with tally:
                    await job.run(stop)

    on = _continued(state_path, is_again=is_again)
    try:
        is_whole = run(work)
    except RmqError:
        if tally.sent:
            note(f"stopped, {tally.line(where, has_cause=False)}{on}")
        raise
    if job is not None:
        _print_end(job, tally, where, on, is_whole=is_whole, as_json=as_json)
    if not is_whole or tally.failed:
        raise typer.Exit(1 if is_whole else ExitCode.INTERRUPTED)


def _continued(state_path: Path | None, *, is_again: bool) -> str:
    """Return a hint on how to continue, for the end of a line."""
    if state_path is None:
        return ""
    return f"; run the same command{' without --again' if is_again else ''} to continue"


def _print_end(job: Replay, tally: Tally, where: str, on: str, *, is_whole: bool, as_json: bool) -> None:
    """Print a summary; ``on`` is the hint on how to continue."""
    found = f"; {job.found:,} were there already" if job.found else ""
    before = f"; {job.state.sent:,} in all runs" if job.state.sent > tally.sent + job.found else ""
    earlier = f"; {job.remembered:,} were replayed before (--again repeats them)" if job.remembered else ""
    text = f"{tally.line(where)}{found}{before}{earlier}"
    if as_json:
        print(msgspec.json.encode(_report(job, tally), enc_hook=plain).decode())
    if as_json or tally.failed or not is_whole:
        note(text if is_whole else f"stopped, {text}{on}")
    else:
        print(text)


def _memory_path(group: str, target: str | None, options: Mapping[str, Any]) -> Path:
    """Return the user's file with the replayed dead letters of a group."""
    folder = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(folder) / "rmqkit" / "replays" / f"{file_name(options['name_servers'], group, target)}.json"


def _topic(topic: str | None, dlq: str | None, store: Path | None, target: str | None, *, is_again: bool) -> str | None:
    """Return the source topic; None for all messages of a store. Raises BadParameter: source or target is missing."""
    if is_again and (dlq is None or store is not None):
        raise typer.BadParameter("--again is for dead letters at brokers: give it with --dlq GROUP and without --store")
    if dlq is not None and topic is not None:
        raise typer.BadParameter(f"give a topic or --dlq, not both: found {topic} and {dlq}")
    if topic is None and dlq is None and store is None:
        raise typer.BadParameter("nothing to replay: give a topic, --dlq GROUP or --store DIR")
    if target is None and dlq is None and store is None:
        raise typer.BadParameter(
            f"no target: give --to TOPIC (--to {topic} sends the messages to the same topic again)"
        )
    return topic if dlq is None else dlq_topic(dlq)


def _report(job: Replay, tally: Tally) -> dict[str, Any]:
    counts = {"sent": tally.sent, "found": job.found, "failed": tally.failed, "isDone": job.state.is_done}
    counts |= {"remembered": job.remembered} if job.memory is not None else {}
    return {"replayId": job.state.replay_id, **counts}


async def _with_kinds(admin: Admin, selection: Selection, group: str | None, kinds: Sequence[str]) -> Selection:
    """Return a selection with the given kinds: each by its number, its name, or a part of its name.
    Raises SettingsError: no kind has that number or part, or several kinds have the part."""
    if not kinds:
        return selection
    found: Kinds | None = None
    if group is not None:
        with suppress(UnknownName):
            found = await admin.dead.kinds(group, selection.by)
    numbered = {str(number): one.kind for number, one in enumerate(found.kinds if found is not None else (), 1)}
    whole: list[str] = []
    parts: list[str] = []
    for text in kinds:
        matches = [number for number, kind in numbered.items() if text in kind]
        if text in numbered.values():
            whole.append(text)
        elif text in numbered or (len(matches) == 1 and not text.isdecimal()):
            number = text if text in numbered else matches[0]
            whole.append(numbered[number])
            note(f"kind {number}: {whole[-1]}")
        elif text.isdecimal():
            there = f"group {group} has {len(numbered)}" if group is not None else "only dead letters at brokers have"
            raise SettingsError(f"--kind {text}: {there} numbered kinds: {_listing(group, selection.by)}")
        elif matches:
            named = ", ".join(f"{number} ({numbered[number]})" for number in matches[:_CANDIDATES_MAX])
            more = f" and {len(matches) - _CANDIDATES_MAX} more" if len(matches) > _CANDIDATES_MAX else ""
            raise SettingsError(f"--kind {text} is a part of {len(matches)} kinds, give the number: {named}{more}")
        elif found is not None and found.is_whole:
            raise SettingsError(f"--kind {text} is a part of no kind: {_listing(group, selection.by)}")
        else:
            parts.append(text)  # the kind may be among the messages that were not examined
    return msgspec.structs.replace(selection, kinds=tuple(whole), kind_parts=tuple(parts))


def _listing(group: str | None, by: str) -> str:
    """Return the command that lists the kinds with their numbers."""
    return f"rmq dead kinds {shlex.quote(group or 'GROUP')}{'' if by == 'kind' else f' --by {shlex.quote(by)}'}"


async def _readers(admin: Admin, target: str | None, group: str | None, retries: Retries | None) -> list[str]:
    """Return lines with the groups that receive the messages."""
    if retries is not None and not retries.is_online:
        return [f"no client of group {group} is online: the messages wait in its retry topic"]
    if target is None:
        return []
    try:
        others = await other_readers(admin, target, group or "")
    except UnknownName:  # the first message creates the topic
        others = []
    if not others or (group is None and len(others) < 2):
        return []
    also = "other groups read it, too, and receive the messages" if group is not None else "groups read it"
    return [f"to {target}: {len(others)} {also}: {', '.join(others)}"]


async def _show(job: Replay, *, as_json: bool) -> None:
    """Print the result of a dry run: the first messages, and their number."""
    counts: Counter[tuple[str, str]] = Counter()
    rows: list[dict[str, str]] = []
    async for picked in job.selected():
        message = picked.message
        to = destination(message, job.target, job.retries) or "?"
        counts[message.topic, to] += 1
        if as_json:
            print(msgspec.json.encode({**msgspec.to_builtins(shown(message)), "newTopic": to}).decode(), flush=True)
        elif len(rows) < _ROWS_MAX:
            body = body_text(message.body)
            body = body if len(body) <= _BODY_CHARS else f"{body[: _BODY_CHARS - 1]}…"
            stored = time_text(message.store_timestamp)[:_SECONDS]
            place = {"stored": stored, "from": picked.place, "to": to}
            rows.append({**place, "tags": message.tags or "", "keys": " ".join(message.keys), "body": body})
    if as_json:
        return
    show(rows, as_json=False)
    if (more := counts.total() - len(rows)) > 0:
        print(f"… and {more:,} more")
    for (topic, to), count in sorted(counts.items()):
        whom = f", which only group {job.retries.group} reads" if job.retries is not None else ""
        print(f"would send {count:,} of {topic} to {to}{whom}")
    if job.remembered:
        print(f"would not send {job.remembered:,} that were replayed before (--again repeats them)")
    elif not counts:
        print("would send nothing: no message is selected")

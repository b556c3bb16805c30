"""``rmq replay``: stored messages sent again."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, closing
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from rmqkit.admin.dead import BY, origin
from rmqkit.admin.replay import Audit, Picked, Replay, Selection, State, StoreSource, TopicSource
from rmqkit.admin.sending import Pace, Stop
from rmqkit.admin.tail import TOOLS_GROUP
from rmqkit.cli import with_options
from rmqkit.cli.admin.frame import COMMON, LIVE_TOPICS, show
from rmqkit.cli.admin.message import shown
from rmqkit.cli.connected import (
    INTERRUPTED,
    Tally,
    client_settings,
    note,
    note_wait,
    run,
    runtime_for,
    sending_settings,
)
from rmqkit.cli.printing import body_text, time_ms, time_text
from rmqkit.cli.store import Config, settings_of
from rmqkit.client.consumer.pull import PullConsumer
from rmqkit.client.producer.producer import Producer
from rmqkit.client.runtime.settings import PullConsumerSettings
from rmqkit.errors import RmqError
from rmqkit.protocol.names import dlq_topic

app = typer.Typer(name="replay", add_completion=False)

_GROUP = "rmq-replay"
_ROWS_MAX = 20
_SECONDS = len("2026-01-31 12:00:00")
_BODY_CHARS = 28


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
            help="Topic to send to. (default with --dlq or --store: the original topic of each message)",
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
        typer.Option("--kind", help="Only messages of this kind (rmq admin dead kinds); repeatable."),
    ] = None,
    by: Annotated[str, typer.Option(help=f"What tells kinds apart: {', '.join(BY)} or property:NAME.")] = "kind",
    rate: Annotated[float, typer.Option(min=0, help="Maximum messages per second; 0 means no limit.")] = 0,
    is_dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be sent, but send nothing.")] = False,
    state_path: Annotated[
        Path | None,
        typer.Option(
            "--state", metavar="FILE", help="Save progress to this file. Run the same command again to continue."
        ),
    ] = None,
    audit_path: Annotated[
        Path | None, typer.Option("--audit", metavar="FILE", help="Append one JSON line per message to this file.")
    ] = None,
    group: Annotated[
        str, typer.Option(help="Consumer group for the requests. No offsets are saved for it.")
    ] = TOOLS_GROUP,
    **options: Any,
) -> None:
    """Send stored messages again: from a topic, from the dead letters of a group, or from a store directory.

    Only messages stored before the command starts are sent. With --state, you
    can interrupt the replay in any way and continue it later: of the chunk in
    progress, at most 256 messages, those that already arrived are found by
    their unique keys and are not sent again."""
    topic = _topic(topic, dlq, store, target)
    begin_ms, end_ms = 0 if begin is None else time_ms(begin), None if end is None else time_ms(end)
    selection = Selection(topic, begin_ms, end_ms, tuple(keys or ()), tags, sql, by, tuple(kinds or ()))
    selection.test()
    where = target or "their own topics"
    as_json = options["as_json"]
    tally = Tally("replaying", None, is_shown=not as_json)
    job: Replay | None = None

    async def work(stop: Stop) -> None:
        nonlocal job
        async with AsyncExitStack() as stack:
            known = topic if store is None else target
            runtime = await stack.enter_async_context(runtime_for(known, options, must_exist=store is None))
            pulling = client_settings(PullConsumerSettings, options)
            consumer = await stack.enter_async_context(PullConsumer(group, settings=pulling, runtime=runtime))
            source: TopicSource | StoreSource
            if store is None:
                source = TopicSource(consumer, topic or "", selection, note_wait)
            else:
                source = StoreSource(store, selection, settings_of(config, store), lambda finding: note(str(finding)))
            task = f"{store or 'brokers'}, {selection}, to {where}"
            state = None if state_path is None else State.load(state_path, task)
            is_continued = state is not None
            state = state or await State.begin(task, source)
            if is_dry_run:
                await _show(source.read(state.lanes), target, as_json=as_json)
                return
            if store is None and selection == Selection(topic, selection.begin_ms):
                tally.total = sum(end - offset for offset, end in state.lanes.values())
            sending = sending_settings(options, message_bytes_max=sys.maxsize)  # a broker took them before
            producer = await stack.enter_async_context(Producer(_GROUP, settings=sending, runtime=runtime))
            job = Replay(
                source,
                producer,
                consumer,
                state,
                target=target,
                state_path=state_path,
                audit=None if audit_path is None else stack.enter_context(closing(Audit(audit_path))),
                pace=Pace(rate),
                is_unsure=is_continued,
                on_chunk=tally.add,
                on_wait=note_wait,
            )
            with tally:
                await job.run(stop)

    on = "; run the same command to continue" if state_path is not None else ""
    try:
        is_whole = run(work)
    except RmqError:
        if tally.sent:
            note(f"stopped, {tally.line(where, has_cause=False)}{on}")
        raise
    if job is not None:
        found = f"; {job.found:,} were there already" if job.found else ""
        before = f"; {job.state.sent:,} in all runs" if job.state.sent > tally.sent else ""
        text = f"{tally.line(where)}{found}{before}"
        if as_json:
            print(msgspec.json.encode(_report(job, tally)).decode())
        if as_json or tally.failed or not is_whole:
            note(text if is_whole else f"stopped, {text}{on}")
        else:
            print(text)
    if not is_whole or tally.failed:
        raise typer.Exit(1 if is_whole else INTERRUPTED)


def _topic(topic: str | None, dlq: str | None, store: Path | None, target: str | None) -> str | None:
    """Whose messages; None for all that a store has. Raises BadParameter: that is not said, or not where they go."""
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
    return {"replayId": job.state.replay_id, **counts}


async def _show(messages: AsyncIterator[Picked], target: str | None, *, as_json: bool) -> None:
    """Print what would be sent: the first messages, and how many."""
    counts: Counter[tuple[str, str]] = Counter()
    rows: list[dict[str, str]] = []
    async for picked in messages:
        message = picked.message
        to = target or origin(message) or "?"
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
        print(f"would send {count:,} of {topic} to {to}")
    if not counts:
        print("would send nothing: no message is selected")

"""The pages of dead letters: the groups with dead letters, the kinds of dead letters, and replays as jobs."""

from __future__ import annotations

from typing import Any

from msgspec import structs
from starlette.responses import FileResponse, Response

from rmqkit.admin.replay.dead import BY, Kinds
from rmqkit.admin.replay.retries import Retries, other_readers
from rmqkit.admin.replay.selection import Preview, preview
from rmqkit.console.access.confirmations import Review, Right
from rmqkit.console.html.render import shell
from rmqkit.console.jobs import Job, Progress, Status
from rmqkit.console.request.forms import Field, Form, change
from rmqkit.console.request.request import Ask, Fault, Page, part
from rmqkit.console.views.changes import time_of
from rmqkit.errors import UnknownName
from rmqkit.sentences import _, joined

_KINDS_MAX = 100
_RATE_MAX = 10_000
_WITHOUT_BODIES = ("topic", "tag", "host")
"""The groupings for users who are not allowed to see bodies. Other groupings may show parts of bodies."""

_BY_LABELS = {
    "kind": _("topic, tag, and reason or shape"),
    "topic": _("topic they came from"),
    "tag": "tag",
    "reason": _("reason (rmqkit_reason)"),
    "host": _("host they were sent from"),
    "shape": _("shape of the body"),
}


async def dead(ask: Ask) -> Page:
    """Show the groups with dead letters in the snapshot."""
    groups = [one for one in ask.snapshot.groups.values() if one.dead]
    unknown = sum(one.dead is None for one in ask.snapshot.groups.values())
    running = {job.group: job.id for job in ask.console.jobs.all() if job.status is Status.RUNNING}
    rows = [
        {"group": one.name, "dead": one.dead, "members": one.members, "job": running.get(one.name, "")}
        for one in sorted(groups, key=lambda one: (-(one.dead or 0), one.name))
    ]
    values = {"groups": rows, "unknown": unknown, "atMs": ask.snapshot.at_ms}
    return Page("dead.html", _("Dead letters"), values, command="rmq dead list")


async def group_dead(ask: Ask) -> Page:
    """Show a group's dead letters by kind, and the form of a replay."""
    name = ask.params["g"]
    by = (ask.text("property") and f"property:{ask.text('property')}") or ask.text("by", "kind")
    if ask.hides_bodies and by not in _WITHOUT_BODIES:
        by = _WITHOUT_BODIES[0]
    asked = await part(_kinds(ask, name, by)) if ask.request.method != "POST" else None
    found: Kinds | None = asked.value if asked is not None else None
    jobs = [job for job in ask.console.jobs.all() if job.group == name and job.env == ask.env.name]
    names = [one.kind for one in found.kinds[:_KINDS_MAX]] if found is not None else _posted(ask)
    form = Form(
        title=_("Dead letters of {name}", name=name), action=_("replay dead letters"), target=name, right=Right.SEND,
        button=_("Dry run"),
        template="group_dead.html", back=ask.link("groups", name), command=shell("rmq dead kinds", name, "--by", by),
        crumbs=[(_("Dead letters"), ask.link("dead")), (name, ask.link("groups", name))],
        fields=[
            Field(name="kinds", label=_("Only these kinds"), kind="many", choices=names, hint=_("none: all of them")),
            Field(
                name="to", label=_("To topic"),
                hint=_("empty: only to this group, through its retry topic. A topic: to every group that reads it"),
            ),
            Field(name="rate", label=_("Messages a second"), kind="number", value="100"),
            Field(
                name="begin", label=_("Dead since (UTC)"), kind="datetime-local",
                hint=_("empty: from the first one"),
            ),
            Field(name="end", label=_("Dead until (UTC)"), kind="datetime-local", hint=_("empty: until now")),
            Field(
                name="again", label=_("Replayed before"), kind="choice",
                choices=("skip", _("send again")), value="skip",
                hint=_("dead letters stay here after a replay; this console remembers which ones it has sent"),
            ),
        ],
        values={
            "name": name,
            "found": found,
            "foundTrouble": asked.trouble if asked is not None else "",
            "by": by,
            "jobs": [_shown(ask, job) for job in jobs],
            "byNames": list(_WITHOUT_BODIES if ask.hides_bodies else BY),
            "byLabels": _BY_LABELS,
            "property": ask.text("property"),
        },
    )  # fmt: skip

    async def plan(given: dict[str, str]) -> Review:
        return await _review(ask, form, name, by, given)

    return await change(ask, form, plan)


def _posted(ask: Ask) -> list[str]:
    """Return the chosen kinds of the posted form, without reading the dead letters again."""
    return [key.removeprefix("kinds.") for key in ask.form if key.startswith("kinds.")]


async def _kinds(ask: Ask, name: str, by: str) -> Kinds:
    try:
        return await ask.admin.dead.kinds(name, by)
    except UnknownName:
        await ask.admin.groups.configs(
            name
        )  # its error lists the existing groups; a group without dead letters has no topic
        return Kinds(group=name, by=by, kinds=[], examined=0, total=0, is_whole=True, troubles=[])


# Long: it makes one review: the form's values, the messages, the requests.
async def _review(ask: Ask, form: Form, name: str, by: str, given: dict[str, str]) -> Review:
    admin = ask.admin
    kinds = given["kinds"].split("\n") if given["kinds"] else []
    rate = _rate(given["rate"])
    job = Job(
        id="", env=ask.env.name, name_servers=ask.env.name_servers, user=ask.user.name,
        is_own=ask.user.credentials is None, group=name, target=given["to"], again=given["again"] == "send again",
        by=by, kinds=kinds,
        begin_ms=time_of(given["begin"], "since") or 0,
        end_ms=time_of(given["end"], "until") or ask.console.clock.now_ms(),
        rate=rate, created_ms=ask.console.clock.now_ms(),
    )  # fmt: skip
    retries = await Retries.find(admin, name) if not job.target else None

    async def look_at() -> Preview:
        memory = None if job.again else ask.console.jobs.memory(job)
        return await preview(admin.calls, job.selection, job.target or None, retries=retries, memory=memory)

    found = await look_at()
    if not found.count:
        before = _(", and {count:,} of them were replayed before", count=found.remembered) if found.remembered else ""
        raise ValueError(
            _(
                "nothing is selected among {examined:,} dead letters{before}",
                examined=found.examined,
                before=before,
            )
        )
    if "" in found.targets:
        why = _("{targets:,} have no original topic: give a topic to send to", targets=found.targets[""])
        raise ValueError(why)
    others: list[str] = []
    if job.target:
        await admin.calls.route(job.target)  # a send to a topic without a route may create the topic
        others = await other_readers(admin, job.target, name)
    job.expected = found.count
    warnings = (
        [
            _(
                "other groups read {target} and get the messages, too: {others}",
                target=job.target,
                others=", ".join(others),
            )
        ]
        if others
        else []
    )
    is_repeat = job.again and any(ask.console.jobs.memory(job).places.values())
    warnings += [_("dead letters that were replayed before are sent again")] if is_repeat else []

    async def look() -> dict[str, str]:
        return _counts(await look_at())

    async def run() -> dict[str, str]:
        begun = ask.console.jobs.begin(job, ask.user.credentials)
        return {"job": begun.id, "state": begun.status, "see": ask.link("jobs", begun.id)}

    words: list[object] = ["--by", by, *(word for one in kinds for word in ("--kind", one))] if kinds else []
    words += ["--from", job.begin_ms] if job.begin_ms else []
    words += ["--until", job.end_ms, "--rate", f"{rate:g}", *(("--to", job.target) if job.target else ())]
    return Review(
        rows=_rows(found, job, retries),
        warning=joined("; ", warnings),
        requests=[_("SEND_MESSAGE_V2 (310) to {topic}: {count:,} messages", topic=topic, count=count)
            for topic, count in found.targets.items()],
        command=shell("rmq replay --dlq", name, *words, *(["--again"] if job.again else []), "--dry-run"),
        back=ask.link("groups", name, "dead", by=by), run=run, look=look, seen=_counts(found),
        typed=name if warnings else "",
    )  # fmt: skip


def _rate(text: str) -> float:
    if not text.isdecimal() or not 0 < int(text) <= _RATE_MAX:
        raise ValueError(
            _("messages a second {text} must be from 1 to {most:,}", text=text or _("are empty: they"), most=_RATE_MAX)
        )
    return float(text)


def _counts(found: Preview) -> dict[str, str]:
    return {_("messages to {topic}", topic=topic): f"{count:,}" for topic, count in found.targets.items()}


def _rows(found: Preview, job: Job, retries: Retries | None) -> list[tuple[str, str]]:
    seconds = found.count / job.rate
    whole = (
        ""
        if found.is_whole
        else _(" at least: only the oldest {examined:,} dead letters were examined", examined=found.examined)
    )
    rows = [(_("Group"), job.group), (_("Messages"), _("{count:,}{whole}", count=found.count, whole=whole))]
    rows += [(_("To {topic}", topic=topic), f"{count:,}") for topic, count in found.targets.items()]
    if retries is not None:
        offline = "" if retries.is_online else _("; none of its clients is online, so the messages wait")
        rows += [(_("Recipients"), _("only group {group}{offline}", group=job.group, offline=offline))]
    rows += (
        [(_("Replayed before"), _("{count:,}: they are skipped", count=found.remembered))] if found.remembered else []
    )
    rows += [(_("Kind {kind}", kind=kind), f"{count:,}") for kind, count in list(found.kinds.items())[:20]]
    rows += [(_("Pace"), _("{rate:g} a second, some {seconds:,.0f} s in all", rate=job.rate, seconds=seconds))]
    rows += (
        [(_("Twice there"), _("{doubles:,}: their unique key occurs more than once", doubles=found.doubles))]
        if found.doubles
        else []
    )
    rows += [(_("For example"), "\n".join(one.place for one in found.samples))]
    return rows + [(_("Unread"), trouble) for trouble in found.troubles]


# -- jobs


def _shown(ask: Ask, job: Job) -> dict[str, Any]:
    progress: Progress = ask.console.jobs.progress(job)
    return {
        **{name: getattr(job, name) for name in job.__struct_fields__},
        **structs.asdict(progress),
        "is_cut": job.status is Status.RUNNING and not progress.is_here,
        "target": job.target or _("group {group} alone", group=job.group),
    }


async def jobs(ask: Ask) -> Page:
    """Show every replay, the newest first."""
    found = [_shown(ask, job) for job in ask.console.jobs.all() if job.env == ask.env.name]
    return Page("jobs.html", _("Replays"), {"jobs": found})


async def job(ask: Ask) -> Page | Response:
    """Show the progress of one replay, pause or resume the replay, or return its lines as a file."""
    name, jobs = ask.params["id"], ask.console.jobs
    found = jobs.find(name)
    if found is None or found.env != ask.env.name:
        raise Fault(404, _("No such job"), _("there is no replay {name} here", name=name))
    if ask.request.method == "POST":
        return await _acted(ask, found)
    path = jobs.audit_path(found)
    if ask.text("download") == "1":
        if path is None:
            raise Fault(404, _("No lines"), _("{name} has sent nothing yet", name=name))
        return FileResponse(path, media_type="application/octet-stream", filename=f"{name}.jsonl")
    values = {"job": _shown(ask, found), "hasLines": path is not None}
    return Page(
        "job.html", _("Replay of {group}", group=found.group), values, {"mayChange": ask.may_change},
        live_s=1 if found.status is Status.RUNNING else 10, crumbs=ask.crumbs("jobs"),
    )  # fmt: skip


async def _acted(ask: Ask, found: Job) -> Page:
    """Pause a replay immediately (no message is lost), or return the review that resumes it."""
    jobs, action = ask.console.jobs, ask.form.get("action", "")
    ask.require_change(_("pause replay") if action == "pause" else _("resume replay"), found.group, Right.SEND)
    back = ask.link("jobs", found.id)
    if action == "pause":
        jobs.pause(found)
        ask.audit(_("pause replay"), found.group, "done", found.id)
        values = {"action": _("pause replay"), "target": found.group, "result": {"job": found.id, "state": "pausing"}}
        return Page("done.html", _("Done: pause replay"), values, {"back": back, "sent": None})
    if action != "resume":
        raise Fault(400, _("What?"), _("action {action!r} must be pause or resume", action=action))
    progress = jobs.progress(found)

    async def run() -> dict[str, str]:
        found.is_own = ask.user.credentials is None
        jobs.resume(found, ask.user.credentials)
        return {"job": found.id, "state": found.status}

    left = _("unknown") if progress.left is None else _("{left:,} dead letters are left to examine", left=progress.left)
    return ask.review(
        Review(
            right=Right.SEND, action=_("resume replay"), target=found.group, back=back,
            rows=[(_("Job"), found.id), (_("Sent"), f"{progress.sent:,}"), (_("Left"), left)], run=run,
            requests=[
                _("QUERY_MESSAGE (12) for what the run before may have sent"),
                _("SEND_MESSAGE_V2 (310) for the rest")],
        )
    )  # fmt: skip

"""The pages of alerts, rules and channels, with forms for changes. Each change has a review and lines in the audit.

Rules and channels make the console send to addresses, and no broker checks these addresses. Therefore only admins can
change rules and channels. The address and the secret of a channel are never shown again. An empty field leaves them
unchanged.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Container, Mapping
from typing import Any, TypeVar

from msgspec.structs import asdict, replace

from rmqkit.console.access.confirmations import Review, Right
from rmqkit.console.alerts.channels import Channel
from rmqkit.console.alerts.rules import OPERATORS, Alert, Rule
from rmqkit.console.request.forms import Field, Form, change, flag
from rmqkit.console.request.request import Ask, Fault, Page
from rmqkit.console.watch.figures import FIGURES
from rmqkit.sentences import _

T = TypeVar("T")
_HOUR_MS = 3_600_000
_SHOWN = 100


def limit(rule: Rule, alert: Alert) -> str:
    """Return the value and the limit of an alert as text."""
    known = FIGURES[rule.figure]
    value, end = known.show(alert.value), known.show(rule.value)
    return _(
        "{title} of {of} {target} is {value}, limit {operator} {end}", title=known.title, of=_(known.of),
        target=alert.target, value=value, operator=rule.operator, end=end,
    )  # fmt: skip


async def alerts(ask: Ask) -> Page:
    """Show the alerts, the rules, the channels, and the waiting notices."""
    found = ask.env.alerts
    states = sorted(found.alerts.values(), key=lambda one: (one.state, -one.since_ms))
    values = {
        "alerts": [{**asdict(one), "text": limit(found.rules[one.rule], one)} for one in states[:_SHOWN]],
        "alertCount": len(states),
        "rules": [{**asdict(one), "words": one.words, "firing": _count(ask, one.name)} for one in found.rules.values()],
        "channels": [_shown(one) for one in found.channels.values()],
        "waiting": [
            {"channel": one.channel, "text": one.event.text, "tries": one.tries, "trouble": one.trouble}
            for one in list(found.waiting)[:_SHOWN]
        ],
        "waitingCount": len(found.waiting),
        "happened": list(reversed(found.happened))[:_SHOWN],
        "lost": found.lost,
        "trouble": found.trouble,
        "mayChange": ask.may(Right.CONSOLE),
    }
    return Page("alerts.html", _("Alerts"), values)


def _count(ask: Ask, rule: str) -> int:
    return sum(one.rule == rule and one.state == "firing" for one in ask.env.alerts.alerts.values())


def _shown(channel: Channel) -> dict[str, Any]:
    """Return the values of a channel that do not contain keys."""
    return {"name": channel.name, "kind": channel.kind, "place": channel.place, "hasSecret": bool(channel.secret)}


# -- rules


async def new_rule(ask: Ask) -> Page:
    """Show the form for a new rule, filled with ``name``, ``figure``, ``selector`` and ``value`` of the address."""
    figure, selector = ask.text("figure", "lag"), ask.text("selector", "*")
    name = ask.text("name") or _free_name(f"{figure}-{selector}", ask.env.alerts.rules)
    return await _rule_form(ask, None, Rule(name=name, figure=figure, selector=selector, value=0.0), ask.text("value"))


def _free_name(wanted: str, taken: Container[str]) -> str:
    """Return an unused name for a rule, made from its figure and selector."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", wanted).strip("-")[:60]
    return next(one for one in (name, *(f"{name}-{number}" for number in range(2, 1_000))) if one not in taken)


async def rule(ask: Ask) -> Page:
    """Show one rule with its figures, and change it."""
    known = _named(ask.params["r"], _("rule"), ask.env.alerts.rules)
    match ask.form.get("do"):
        case "silence":
            hours = ask.form.get("hours", "")
            if not hours.isdecimal() or int(hours) > 24 * 90:
                why = _("hours {hours!r} must be a number from 0 to 2160", hours=hours)
                raise Fault(400, _("Not a number of hours"), why)
            until = ask.console.clock.now_ms() + int(hours) * _HOUR_MS if int(hours) else 0
            rows = [(_("Silent"), _("for {hours} h", hours=hours) if until else _("no longer"))]
            return _review(ask, _("silence alert rule"), known, rows, _put(ask, replace(known, silent_until_ms=until)))
        case "delete":
            rows = [(_("Looks at"), known.words), (_("Fires now"), str(_count(ask, known.name)))]
            return _review(ask, _("delete alert rule"), known, rows, lambda: ask.env.alerts.delete_rule(known.name))
    return await _rule_form(ask, known, known, f"{known.value:.15g}")


async def _rule_form(ask: Ask, known: Rule | None, shown: Rule, value: str) -> Page:
    found = ask.env.alerts
    own = [one for one in found.alerts.values() if known is not None and one.rule == known.name]
    form = _form(ask, "rule", known, shown.name)
    figures = {
        name: _("{title} ({of}; {unit})", title=one.title, of=_(one.of), unit=one.hint or one.unit)
        for name, one in FIGURES.items()
    }
    channels = {"": _("this page only")} | {name: name for name in found.channels}
    form.fields += [
        Field(name="figure", label=_("Figure"), kind="choice", value=shown.figure, choices=[*figures], labels=figures),
        Field(name="selector", label=_("Of"), value=shown.selector, hint=_("as in file names: billing-*; * for all")),
        Field(name="operator", label=_("Operator"), kind="choice", value=shown.operator, choices=[*OPERATORS]),
        Field(name="value", label=_("Value"), value=value, hint=_("in the unit of the figure")),
        Field(
            name="samples", label=_("Samples in a row"), kind="number", value=str(shown.samples),
            hint=_("a sample is a look at the cluster, every 10 s; an unknown figure fires nothing"),
        ),
        Field(
            name="channel", label=_("Channel"), kind="choice", value=shown.channel, choices=[*channels], labels=channels
        ),
    ]  # fmt: skip
    alerts = [{**asdict(one), "text": limit(found.rules[one.rule], one)} for one in own[:_SHOWN]]
    form.values = {"rule": known, "alerts": alerts, "alertCount": len(own)}

    async def plan(given: dict[str, str]) -> Review:
        wanted = Rule(
            name=known.name if known is not None else given["name"], figure=given["figure"],
            selector=given["selector"], operator=given["operator"], value=_number(given["value"], "value"),
            samples=int(_number(given["samples"], "samples")), channel=given["channel"],
            silent_until_ms=known.silent_until_ms if known is not None else 0,
        )  # fmt: skip
        wanted.check(found.channels)
        if known is None and wanted.name in found.rules:
            raise ValueError(_("there is a rule {name}: change it, or take another name", name=wanted.name))
        rows = [
            (_("Looks at"), wanted.words),
            (_("Fires after"), _("{samples} samples in a row", samples=wanted.samples)),
            (_("Notifies"), wanted.channel or _("this page only")),
        ]
        return _reviewed(ask, form.action, known, wanted.name, rows, _put(ask, wanted))

    return await change(ask, form, plan)


def _put(ask: Ask, wanted: Rule) -> Callable[[], Awaitable[None]]:
    return lambda: ask.env.alerts.put_rule(wanted)


# -- channels


async def new_channel(ask: Ask) -> Page:
    """Show the form for a new channel."""
    return await _channel_form(ask, None)


async def channel(ask: Ask) -> Page:
    """Show one channel, and change it."""
    known = _named(ask.params["c"], _("channel"), ask.env.alerts.channels)
    name = known.name

    async def test() -> dict[str, str]:
        if trouble := await ask.env.alerts.test(name):
            raise Fault(502, _("Not delivered"), _("channel {name}: {trouble}", name=name, trouble=trouble))
        return {"delivered": _("yes")}

    match ask.form.get("do"):
        case "test":
            return _review(ask, _("test alert channel"), known, _channel_rows(known), test)
        case "delete":
            rows = _channel_rows(known)
            return _review(ask, _("delete alert channel"), known, rows, lambda: ask.env.alerts.delete_channel(name))
    return await _channel_form(ask, known)


async def _channel_form(ask: Ask, known: Channel | None) -> Page:
    found = ask.env.alerts
    form = _form(ask, "channel", known, "")
    address = Field(
        name="url", label=_("Address"), kind="url", hint=_("https://… of a webhook, or an address of apprise")
    )
    secret = Field(name="secret", label=_("Secret of a webhook"), kind="password")
    form.fields += [address, secret]
    if known is not None:
        address.hint = _("now {place}; empty keeps it", place=known.place)
        if known.secret:
            secret.hint = _("there is one; empty keeps it")
            form.fields.append(flag("no_secret", _("Remove the secret"), False))
    form.values = {
        "channel": _shown(known) if known is not None else None,
        "usedBy": [one.name for one in found.rules.values() if known is not None and one.channel == known.name],
    }

    async def plan(given: dict[str, str]) -> Review:
        address.value = ""  # a page that shows an error must not show a key
        url, key = given["url"], given["secret"]
        if known is not None:
            # The secret belongs to one host. The user must enter it again for an address with another host.
            is_same_host = not url or url.split("/")[:3] == known.url.split("/")[:3]
            url, key = url or known.url, key or (known.secret if is_same_host else "")
        wanted = Channel(
            name=known.name if known is not None else given["name"],
            url=url,
            secret="" if given.get("no_secret") == "yes" else key,
        )
        await asyncio.to_thread(wanted.check)
        if known is None and wanted.name in found.channels:
            raise ValueError(_("there is a channel {name}: change it, or take another name", name=wanted.name))
        rows = _channel_rows(wanted)
        return _reviewed(ask, form.action, known, wanted.name, rows, lambda: found.put_channel(wanted))

    return await change(ask, form, plan)


def _channel_rows(wanted: Channel) -> list[tuple[str, str]]:
    secret = _("one, which is not shown") if wanted.secret else _("none")
    return [(_("Kind"), wanted.kind), (_("Address"), wanted.place), (_("Secret"), secret)]


# -- both


def _form(ask: Ask, kind: str, known: Rule | Channel | None, name: str) -> Form:
    """Return the form of a rule or a channel. The form of a new one has a field for the name."""
    is_rule = kind == "rule"
    title = _("New rule") if is_rule else _("New channel")
    if known is not None:
        title = _("Rule {name}", name=known.name) if is_rule else _("Channel {name}", name=known.name)
    hint = _("letters, digits, dots, - and _, at most 64 characters")
    return Form(
        title=title, action=_("save alert rule") if is_rule else _("save alert channel"),
        target=known.name if known is not None else ask.form.get("name", "").strip()[:64],
        fields=[Field(name="name", label=_("Name"), value=name, hint=hint)] if known is None else [],
        back=ask.link("alerts"), crumbs=ask.crumbs("alerts"), right=Right.CONSOLE, template=f"{kind}.html",
    )  # fmt: skip


def _review(
    ask: Ask, action: str, known: Rule | Channel, rows: list[tuple[str, str]], run: Callable[[], Awaitable[Any]]
) -> Page:
    """Return the page with the review of a change that has no form."""
    ask.require_change(action, known.name, Right.CONSOLE)
    return ask.review(_reviewed(ask, action, known, known.name, rows, run))


def _reviewed(
    ask: Ask, action: str, known: Rule | Channel | None, name: str, rows: list[tuple[str, str]],
    run: Callable[[], Awaitable[Any]],
) -> Review:  # fmt: skip
    """Return a review. Its change is refused if the rule or channel no longer equals ``known``."""
    is_rule = "rule" in action
    present: Mapping[str, Rule | Channel] = ask.env.alerts.rules if is_rule else ask.env.alerts.channels

    async def done() -> dict[str, str]:
        if (found := present.get(name)) != known:
            is_there = _("it is not there now") if found is None else _("it has changed")
            why = _("another user changed it: {is_there}; load the page again", is_there=is_there)
            raise Fault(409, _("Changed since you looked"), why)
        try:
            result = await run()
        except ValueError as error:
            raise Fault(409, _("Not done"), str(error)) from None
        return result or {"kept": _("in memory only") if ask.env.alerts.is_in_memory else _("yes")}

    what = _("one notice to the channel") if action.startswith("test") else _("nothing: the console keeps it")
    return Review(
        action=action, target=name, right=Right.CONSOLE, rows=[(_("Rule") if is_rule else _("Channel"), name), *rows],
        requests=[what], back=ask.link("alerts"), run=done,
    )  # fmt: skip


def _named(name: str, what: str, known: Mapping[str, T]) -> T:
    """Return the rule or the channel with a name. Raises Fault: there is no such rule or channel."""
    if name in known:
        return known[name]
    names = ", ".join(known) or _("none")
    why = _("there is no {what} {name}: there are {known}", what=what, name=name, known=names)
    raise Fault(404, _("No such {what}", what=what), why)


def _number(text: str, what: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(_("{what} {text!r} must be a number", what=_(what), text=text)) from None

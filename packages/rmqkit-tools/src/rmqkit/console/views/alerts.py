"""Alerts: what fires, rules and channels, and the forms that change them, each with a review and lines in the audit.

They make the console send to addresses, and no broker knows them: admins alone change them. A channel's address and its
secret are written into a form and never shown again: an empty field keeps what there is.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Container
from typing import Any

from msgspec.structs import asdict, replace

from rmqkit.console.access.confirmations import Review
from rmqkit.console.access.logins import Role
from rmqkit.console.alerts.channels import Channel, kinds
from rmqkit.console.alerts.rules import OPERATORS, Alert, Rule
from rmqkit.console.request.request import Ask, Fault, Page
from rmqkit.console.watch.figures import FIGURES
from rmqkit.sentences import _

_HOUR_MS = 3_600_000
_EMPTY = {"name": "", "figure": "lag", "selector": "*", "operator": ">", "value": "", "samples": "3", "channel": ""}
_SHOWN = 100


def limit(rule: Rule, alert: Alert) -> str:
    """An alert in words."""
    known = FIGURES[rule.figure]
    value, end = known.show(alert.value), known.show(rule.value)
    return _(
        "{title} of {of} {target} is {value}, limit {operator} {end}",
        title=known.title,
        of=_(known.of),
        target=alert.target,
        value=value,
        operator=rule.operator,
        end=end,
    )


async def alerts(ask: Ask) -> Page:
    """What fires, and everything around it."""
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
        "mayChange": _may_change(ask),
    }
    return Page(template="alerts.html", title=_("Alerts"), values=values, live_s=10)


def _count(ask: Ask, rule: str) -> int:
    return sum(one.rule == rule and one.state == "firing" for one in ask.env.alerts.alerts.values())


def _shown(channel: Channel) -> dict[str, Any]:
    """A channel without its keys."""
    return {"name": channel.name, "kind": channel.kind, "place": channel.place, "hasSecret": bool(channel.secret)}


# -- rules


async def new_rule(ask: Ask) -> Page:
    """A form for a rule."""
    if ask.request.method != "POST":
        asked = {key: ask.text(key, text) for key, text in _EMPTY.items()}
        asked["name"] = asked["name"] or _free_name(f"{asked['figure']}-{asked['selector']}", ask.env.alerts.rules)
        return _rule_form(ask, None, asked, "")
    return await _save_rule(ask, None)


def _free_name(wanted: str, taken: Container[str]) -> str:
    """Return a name for a rule that no rule has, made of its figure and its selector."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", wanted).strip("-")[:60]
    return next(one for one in (name, *(f"{name}-{number}" for number in range(2, 1_000))) if one not in taken)


async def rule(ask: Ask) -> Page:
    """One rule, with what it sees, and what may be done to it."""
    name = ask.params["r"]
    known = ask.env.alerts.rules.get(name)
    if ask.request.method != "POST":
        if known is None:
            raise _none(_("rule"), name, ask.env.alerts.rules)
        return _rule_form(ask, known, _texts(known), "")
    if ask.form.get("review"):
        return await _confirmed(ask, _("alert rule"), name)
    if known is None:
        raise _none(_("rule"), name, ask.env.alerts.rules)
    match ask.form.get("do"):
        case "silence":
            _require_admin(ask, _("silence alert rule"), name)
            hours = ask.form.get("hours", "")
            if not hours.isdecimal() or int(hours) > 24 * 90:
                return _rule_form(
                    ask, known, _texts(known), _("hours {hours!r} must be a number from 0 to 2160", hours=hours)
                )
            until = ask.console.clock.now_ms() + int(hours) * _HOUR_MS if int(hours) else 0
            changed = replace(known, silent_until_ms=until)
            rows = [(_("Rule"), name), (_("Silent"), _("for {hours} h", hours=hours) if until else _("no longer"))]
            return _review(ask, _("silence alert rule"), name, rows, _put(ask, changed, known))
        case "delete":
            _require_admin(ask, _("delete alert rule"), name)
            rows = [(_("Rule"), name), (_("Looks at"), known.words), (_("Fires now"), str(_count(ask, name)))]

            async def delete() -> None:
                _same(ask.env.alerts.rules.get(name), known)
                await ask.env.alerts.delete_rule(name)

            return _review(ask, _("delete alert rule"), name, rows, delete)
    return await _save_rule(ask, known)


async def _save_rule(ask: Ask, known: Rule | None) -> Page:
    name = known.name if known is not None else ask.form.get("name", "").strip()
    if ask.form.get("review"):
        return await _confirmed(ask, _("alert rule"), name)
    _require_admin(ask, _("save alert rule"), name[:64])
    form = {key: ask.form.get(key, "").strip() for key in _EMPTY} | {"name": name}
    try:
        wanted = Rule(
            name=name,
            figure=form["figure"],
            selector=form["selector"],
            operator=form["operator"],
            value=_number(form["value"], "value"),
            samples=int(_number(form["samples"], "samples")),
            channel=form["channel"],
            silent_until_ms=known.silent_until_ms if known is not None else 0,
        )
        wanted.check(ask.env.alerts.channels)
        if known is None and name in ask.env.alerts.rules:
            raise ValueError(_("there is a rule {name}: change it, or take another name", name=name))
    except ValueError as error:
        return _rule_form(ask, known, form, str(error))
    rows = [
        (_("Rule"), name),
        (_("Looks at"), wanted.words),
        (_("Fires after"), _("{samples} samples in a row", samples=wanted.samples)),
    ]
    rows.append((_("Notifies"), wanted.channel or _("this page only")))
    return _review(ask, _("save alert rule"), name, rows, _put(ask, wanted, known))


def _put(ask: Ask, wanted: Rule, known: Rule | None) -> Callable[[], Awaitable[None]]:
    async def put() -> None:
        _same(ask.env.alerts.rules.get(wanted.name), known)
        await ask.env.alerts.put_rule(wanted)

    return put


def _texts(known: Rule) -> dict[str, str]:
    return {key: str(getattr(known, key)) for key in _EMPTY} | {"value": f"{known.value:.15g}"}


def _rule_form(ask: Ask, known: Rule | None, form: dict[str, str], trouble: str) -> Page:
    found = ask.env.alerts
    own = [one for one in found.alerts.values() if known is not None and one.rule == known.name]
    values = {
        "rule": known,
        "form": form,
        "trouble": trouble,
        "alerts": [{**asdict(one), "text": limit(found.rules[one.rule], one)} for one in own[:_SHOWN]],
        "alertCount": len(own),
        "mayChange": _may_change(ask),
    }
    more = {"figures": FIGURES, "operators": list(OPERATORS), "channels": list(found.channels)}
    title = _("Rule {name}", name=known.name) if known is not None else _("New rule")
    return _form(ask, "rule.html", title, values, more, trouble)


# -- channels


async def new_channel(ask: Ask) -> Page:
    """A form for a channel."""
    if ask.request.method != "POST":
        return _channel_form(ask, None, {"name": "", "kind": "webhook"}, "")
    return await _save_channel(ask, None)


async def channel(ask: Ask) -> Page:
    """One channel, and what may be done to it."""
    name = ask.params["c"]
    known = ask.env.alerts.channels.get(name)
    if known is None and not ask.form.get("review"):
        raise _none(_("channel"), name, ask.env.alerts.channels)
    if ask.request.method != "POST" or known is None:
        if ask.form.get("review"):
            return await _confirmed(ask, _("alert channel"), name)
        assert known is not None
        return _channel_form(ask, known, _shown(known), "")
    match ask.form.get("do"):
        case "test":
            _require_admin(ask, _("test alert channel"), name)

            async def test() -> dict[str, str]:
                if trouble := await ask.env.alerts.test(name):
                    raise Fault(502, _("Not delivered"), _("channel {name}: {trouble}", name=name, trouble=trouble))
                return {"delivered": _("yes")}

            return _review(ask, _("test alert channel"), name, _channel_rows(known), test)
        case "delete":
            _require_admin(ask, _("delete alert channel"), name)

            async def delete() -> None:
                _same(ask.env.alerts.channels.get(name), known)
                await _or_fault(ask.env.alerts.delete_channel(name))

            return _review(ask, _("delete alert channel"), name, _channel_rows(known), delete)
    return await _save_channel(ask, known)


async def _save_channel(ask: Ask, known: Channel | None) -> Page:
    name = known.name if known is not None else ask.form.get("name", "").strip()
    if ask.form.get("review"):
        return await _confirmed(ask, _("alert channel"), name)
    _require_admin(ask, _("save alert channel"), name[:64])
    url, secret = ask.form.get("url", "").strip(), ask.form.get("secret", "")
    form = {"name": name, "kind": ask.form.get("kind", "webhook")}
    if known is not None:
        # A key goes to the host that it was given for: another address needs it again.
        is_same_host = not url or url.split("/")[:3] == known.url.split("/")[:3]
        url, secret = url or known.url, secret or (known.secret if is_same_host else "")
    try:
        wanted = Channel(name=name, kind=form["kind"], url=url, secret="" if ask.form.get("no_secret") else secret)
        wanted.check()
        if known is None and name in ask.env.alerts.channels:
            raise ValueError(_("there is a channel {name}: change it, or take another name", name=name))
    except ValueError as error:
        return _channel_form(ask, known, form, str(error))

    async def put() -> None:
        _same(ask.env.alerts.channels.get(name), known)
        await _or_fault(ask.env.alerts.put_channel(wanted))

    return _review(ask, _("save alert channel"), name, _channel_rows(wanted), put)


def _channel_rows(wanted: Channel) -> list[tuple[str, str]]:
    secret = _("one, which is not shown") if wanted.secret else _("none")
    return [(_("Channel"), wanted.name), (_("Kind"), wanted.kind), (_("Address"), wanted.place), (_("Secret"), secret)]


def _channel_form(ask: Ask, known: Channel | None, form: dict[str, Any], trouble: str) -> Page:
    rules = [one.name for one in ask.env.alerts.rules.values() if known is not None and one.channel == known.name]
    values = {
        "channel": _shown(known) if known is not None else None,
        "form": form,
        "trouble": trouble,
        "usedBy": rules,
        "mayChange": _may_change(ask),
    }
    title = _("Channel {name}", name=known.name) if known is not None else _("New channel")
    return _form(ask, "channel.html", title, values, {"kinds": kinds()}, trouble)


# -- both


def _form(ask: Ask, template: str, title: str, values: dict[str, Any], more: dict[str, Any], trouble: str) -> Page:
    crumbs = [(_("Alerts"), ask.link("alerts"))]
    return Page(template=template, title=title, values=values, more=more, status=400 if trouble else 200, crumbs=crumbs)


def _review(ask: Ask, action: str, target: str, rows: list[tuple[str, str]], run: Callable[[], Awaitable[Any]]) -> Page:
    what = _("one POST to the channel") if action.startswith("test") else _("nothing: the console keeps it")

    async def done() -> dict[str, str]:
        return await run() or {"kept": _("in memory only") if ask.env.alerts.is_in_memory else _("yes")}

    return ask.review(
        Review(
            user=ask.user.name,
            env=ask.env.name,
            action=action,
            target=target,
            rows=rows,
            requests=[what],
            command="",
            back=ask.link("alerts"),
            run=done,
        )
    )


async def _confirmed(ask: Ask, what: str, name: str) -> Page:
    ask.require_change(_("change {what}", what=what), name[:64])
    return await ask.confirmed(ask.form["review"])


def _may_change(ask: Ask) -> bool:
    return ask.may_change and ask.user.role is Role.ADMIN


def _require_admin(ask: Ask, action: str, name: str) -> None:
    """Raises Fault: rules and channels are the console's own, and no broker decides who changes them."""
    ask.require_change(action, name)
    if not _may_change(ask):
        why = _("{name} is no admin: alerts make the console send to addresses", name=ask.user.name)
        ask.audit(action, name, "refused", why)
        raise Fault(403, _("Not allowed"), _("{action} {name} was not done: {why}", action=action, name=name, why=why))


def _same(found: Rule | Channel | None, known: Rule | Channel | None) -> None:
    """Raises Fault: somebody changed it since it was looked at."""
    if found != known:
        is_there = _("it is not there now") if found is None else _("it is another now")
        raise Fault(
            409,
            _("Changed since you looked"),
            _("somebody changed it meanwhile: {is_there}; look again", is_there=is_there),
        )


async def _or_fault(changing: Awaitable[None]) -> None:
    try:
        await changing
    except ValueError as error:
        raise Fault(409, _("Not done"), str(error)) from None


def _none(what: str, name: str, known: dict[str, Any]) -> Fault:
    return Fault(
        404,
        _("No such {what}", what=what),
        _("there is no {what} {name}: there are {known}", what=what, name=name, known=", ".join(known) or _("none")),
    )


def _number(text: str, what: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(_("{what} {text!r} must be a number", what=_(what), text=text)) from None

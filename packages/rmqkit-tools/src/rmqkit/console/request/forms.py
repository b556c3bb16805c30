"""Forms as data: a page of fields, whose values become a `Review`, whose button does it.

A view says which fields there are, with the values they have now, and makes the review of what was filled in. What
cannot be used is said above the form, and what was typed stays in it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from msgspec import Struct

from rmqkit.console.access.confirmations import Review, Right
from rmqkit.console.request.request import Ask, Page
from rmqkit.errors import ClientError, SettingsError, UnknownName
from rmqkit.sentences import _

__all__ = ["EVERYWHERE", "Field", "Form", "change", "chosen_brokers", "flag", "number", "pairs", "where"]

EVERYWHERE = _("all brokers")
_FLAG = ("yes", "no")


class Field(Struct, kw_only=True):
    """One field.

    Attributes:
        kind: of its input: ``text``, ``number``, ``password``, ``url``, ``area``, ``choice``, ``many`` (check boxes)
            or ``datetime-local``.
        value: what it has; of check boxes, the chosen ones, one a line.
        hint: what it means, in a sentence.
        choices: what may be chosen; of text, what is offered.
        labels: of choices, what people see in their place.
    """

    name: str
    label: str
    kind: str = "text"
    value: str = ""
    hint: str = ""
    choices: Sequence[str] = ()
    labels: Mapping[str, str] = {}


class Form(Struct, kw_only=True):
    """A page with a form.

    Attributes:
        action, target: as the audit has them.
        about: what it shows above the fields: name and value.
        hint: a sentence above them.
        warning: what cannot be taken back, or empty.
        right: what a user needs to fill it in.
        template, values: a page of its own around the form, and what that shows.
        button: its text.
    """

    title: str
    action: str
    target: str
    fields: list[Field]
    back: str
    about: list[tuple[str, str]] = []
    hint: str = ""
    warning: str = ""
    command: str = ""
    crumbs: list[tuple[str, str]] = []
    right: Right = Right.ADMINISTER
    template: str = "form.html"
    values: dict[str, Any] = {}
    button: str = "Review"


async def change(ask: Ask, form: Form, plan: Callable[[dict[str, str]], Awaitable[Review]]) -> Page:
    """The form, or the review that ``plan`` makes of what was filled in. Raises Fault: this user may not."""
    if ask.request.method != "POST":
        return _page(ask, form, "")
    ask.require_change(form.action, form.target, form.right)
    given = {name: text.strip() for name, text in ask.form.items()}
    for field in form.fields:
        if field.kind == "many":
            field.value = "\n".join(one for one in field.choices if f"{field.name}.{one}" in given)
            given[field.name] = field.value
        else:
            given.setdefault(field.name, "")
            field.value = given[field.name]
    try:
        review = await plan(given)
    except (ValueError, SettingsError, UnknownName, ClientError) as error:
        return _page(ask, form, str(error))
    review.right = form.right
    for name in ("action", "target", "command", "back", "warning"):
        setattr(review, name, getattr(review, name) or getattr(form, name))
    return ask.review(review)


def _page(ask: Ask, form: Form, trouble: str) -> Page:
    values: dict[str, Any] = {
        "action": form.action,
        "target": form.target,
        "about": form.about,
        "fields": [{**_plain(one), "value": "" if one.kind == "password" else one.value} for one in form.fields],
        "hint": form.hint,
        "warning": form.warning,
        "trouble": trouble,
        "mayChange": ask.may(form.right),
    }
    return Page(
        form.template, form.title, values | form.values, {"back": form.back, "button": form.button},
        status=400 if trouble else 200, command=form.command, crumbs=form.crumbs,
    )  # fmt: skip


def _plain(field: Field) -> dict[str, Any]:
    return {name: getattr(field, name) for name in field.__struct_fields__}


# -- what fields of several forms have in common


def where(ask: Ask, brokers: Sequence[str] = (), hint: str = "") -> Field:
    """Which brokers a change is for."""
    names = sorted(brokers) or masters(ask)
    return Field(
        name="where", label=_("Where"), kind="choice", value=EVERYWHERE, choices=(EVERYWHERE, *names), hint=hint
    )


def masters(ask: Ask) -> list[str]:
    """The names of the masters that the watcher knows."""
    return sorted({one.row.broker_name for one in ask.snapshot.brokers if one.is_master})


def chosen_brokers(ask: Ask, given: Mapping[str, str], brokers: Sequence[str] = ()) -> list[str]:
    """The brokers that a form's ``where`` names. Raises ValueError: there is no such one."""
    names = sorted(brokers) or masters(ask)
    wanted = given.get("where") or EVERYWHERE
    if wanted != EVERYWHERE and wanted not in names:
        raise ValueError(_("broker {wanted} must be one of {names}", wanted=wanted, names=", ".join(names)))
    if not names:
        raise ValueError(_("no broker is known yet: look again in a few seconds"))
    return names if wanted == EVERYWHERE else [wanted]


def number(given: Mapping[str, str], name: str, label: str, low: int = 0) -> int:
    """A whole number. Raises ValueError: it is none."""
    text = given.get(name, "")
    if not text.lstrip("-").isdecimal() or int(text) < low or len(text) > 18:
        raise ValueError(
            _(
                "{label} {text} must be a whole number from {low} on",
                label=_(label),
                text=text or _("is empty: it"),
                low=low,
            )
        )
    return int(text)


def flag(name: str, label: str, value: bool, hint: str = "") -> Field:
    """A choice of yes and no."""
    return Field(name=name, label=label, kind="choice", value=_FLAG[not value], choices=_FLAG, hint=hint)


def pairs(text: str, what: str) -> dict[str, str]:
    """Lines of ``name=value``. Raises ValueError: one is none."""
    found = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        name, sign, value = line.partition("=")
        if not sign or not name.strip():
            raise ValueError(_("{what} {line!r} must be name=value, one a line", what=_(what), line=line))
        found[name.strip()] = value.strip()
    return found

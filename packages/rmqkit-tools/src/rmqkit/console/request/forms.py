"""Forms as data: a page with fields. The submitted values lead to a `Review`.

A view defines the fields with their current values, and makes the review from the submitted values. If a value is not
valid, the page shows the form again, with the submitted values and the error.
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
    """One field of a form.

    Attributes:
        kind: the type of input: ``text``, ``number``, ``password``, ``url``, ``area``, ``choice``, ``many`` (check
            boxes) or ``datetime-local``.
        value: the current value; for check boxes, the chosen values, one per line.
        hint: a sentence about the field.
        choices: the allowed values; for ``text``, suggested values.
        labels: the texts that are shown for some choices.
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
        action, target: the values for the audit.
        about: the names and values above the fields.
        hint: a sentence above the fields.
        warning: a text about the part that cannot be undone, or empty.
        right: the right that a user needs for the change.
        template, values: the template of the page, and further values for it.
        button: the text of the button.
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
    """Return the form, or the review that ``plan`` makes from the posted values. Raises Fault: the right is missing."""
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


# -- fields of several forms


def where(ask: Ask, brokers: Sequence[str] = (), hint: str = "") -> Field:
    """Return the field ``where`` for the brokers of a change."""
    names = sorted(brokers) or masters(ask)
    return Field(
        name="where", label=_("Where"), kind="choice", value=EVERYWHERE, choices=(EVERYWHERE, *names), hint=hint
    )


def masters(ask: Ask) -> list[str]:
    """Return the names of the masters that the watcher knows."""
    return sorted({one.row.broker_name for one in ask.snapshot.brokers if one.is_master})


def chosen_brokers(ask: Ask, given: Mapping[str, str], brokers: Sequence[str] = ()) -> list[str]:
    """Return the brokers in the field ``where``. Raises ValueError: there is no such broker."""
    names = sorted(brokers) or masters(ask)
    wanted = given.get("where") or EVERYWHERE
    if wanted != EVERYWHERE and wanted not in names:
        raise ValueError(_("broker {wanted} must be one of {names}", wanted=wanted, names=", ".join(names)))
    if not names:
        raise ValueError(_("no broker is known yet: look again in a few seconds"))
    return names if wanted == EVERYWHERE else [wanted]


def number(given: Mapping[str, str], name: str, label: str, low: int = 0) -> int:
    """Return an integer from a form. Raises ValueError: the text is not an integer of at least ``low``."""
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
    """Return a field with the choices yes and no."""
    return Field(name=name, label=label, kind="choice", value=_FLAG[not value], choices=_FLAG, hint=hint)


def pairs(text: str, what: str) -> dict[str, str]:
    """Return the pairs in lines of ``name=value``. Raises ValueError: a line has another form."""
    found = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        name, sign, value = line.partition("=")
        if not sign or not name.strip():
            raise ValueError(_("{what} {line!r} must be name=value, one a line", what=_(what), line=line))
        found[name.strip()] = value.strip()
    return found

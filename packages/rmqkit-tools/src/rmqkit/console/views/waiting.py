"""The pages of messages that wait in brokers: delay levels, timed messages, half messages, popped messages."""

from __future__ import annotations

from typing import Any

from rmqkit.console.access.confirmations import Review, Right
from rmqkit.console.html import render
from rmqkit.console.html.render import shell
from rmqkit.console.request.request import Ask, Fault, Page
from rmqkit.sentences import _

_TABS = (("delays", _("Delays")), ("timed", _("Timed messages")), ("transactions", _("Transactions")), ("pop", "POP"))


_TIMED_SHOWN = 200


def _page(ask: Ask, name: str, title: str, values: dict[str, object]) -> Page:
    return Page(
        f"waiting_{name}.html", title, values,
        {"places": [(key, text, ask.link("waiting", key)) for key, text in _TABS], "shown": name},
        command=shell("rmq waiting", name),
    )  # fmt: skip


async def delays(ask: Ask) -> Page:
    """Show delay levels, and timed messages by topic and due time: 4 requests per master, 1 per used level."""
    found = await ask.admin.waiting.delays()
    return _page(ask, "delays", _("Delayed messages"), {"brokers": found})


async def transactions(ask: Ask) -> Page:
    """Show half messages by state, within the budget of one search."""
    return _page(ask, "transactions", _("Open transactions"), {"found": await ask.admin.waiting.transactions()})


async def pop(ask: Ask) -> Page:
    """Show pending check points of POP, within the budget of one search."""
    return _page(ask, "pop", _("Popped messages"), {"found": await ask.admin.waiting.pops()})


async def timed(ask: Ask) -> Page:
    """Show timed messages, within the budget of one search, with a form to cancel or deliver each message."""
    if ask.request.method == "POST":
        return await _timed_changed(ask)
    topic = ask.text("topic")
    found = await ask.admin.waiting.timed(topic=topic)
    page = _page(ask, "timed", _("Timed messages"), {"found": found})
    page.more |= {"topic": topic, "rows": _TIMED_SHOWN}
    return page


async def _timed_changed(ask: Ask) -> Page:
    """Return the review that cancels a timed message, or delivers it now."""
    broker, offset, way = (ask.form.get(name, "") for name in ("broker", "offset", "do"))
    if way not in ("cancel", "deliver") or not offset.isdecimal() or len(offset) > 18:
        raise Fault(400, _("What?"), _("choose a message, and cancel or deliver"))
    action = _("cancel timed message") if (is_cancel := way == "cancel") else _("deliver timed message now")
    ask.require_change(action, f"{broker}@{offset}", Right.SEND)
    timers = ask.admin.waiting.timers
    message, record = await timers.at(broker, int(offset))
    recall = _("RECALL_MESSAGE (370) of {id} to {broker}", id=message.msg_id, broker=broker)
    send = _("SEND_MESSAGE_V2 (310) of a copy to {topic}, with the same unique key", topic=message.topic)

    async def run() -> Any:
        timers = ask.admin.waiting.timers
        return [await timers.recall(message)] if is_cancel else await timers.deliver(message, record)

    return ask.review(
        Review(
            right=Right.SEND,
            action=action,
            target=message.topic,
            rows=[
                (_("Topic"), message.topic),
                (_("Message"), message.msg_id),
                (_("Keys"), " ".join(message.keys)),
                (_("Due"), str(render.time(message.due_ms).striptags())),
            ],
            requests=[recall] if is_cancel else [send, recall],
            back=ask.link("waiting", "timed"),
            run=run,
            warning=_("a cancelled message is never delivered") if is_cancel else "",
        )
    )

"""What waits inside brokers: delay levels and timed messages, half messages, popped messages."""

from __future__ import annotations

from rmqkit.console.request.request import Ask, Page
from rmqkit.sentences import _

_TABS = (("delays", _("Delays")), ("transactions", _("Transactions")), ("pop", "POP"))


def _page(ask: Ask, name: str, title: str, values: dict[str, object]) -> Page:
    return Page(
        template=f"waiting_{name}.html",
        title=title,
        values=values,
        more={"places": [(key, text, ask.link("waiting", key)) for key, text in _TABS], "shown": name},
        live_s=10,
        command=f"rmq waiting {name}",
    )


async def delays(ask: Ask) -> Page:
    """Delay levels, and timed messages by topic and by when they are due: per master 4 requests, and one per level
    that has messages."""
    found = await ask.admin.waiting.delays()
    return _page(ask, "delays", _("Delayed messages"), {"brokers": found})


async def transactions(ask: Ask) -> Page:
    """Half messages by state, as far as one budget of a search goes."""
    return _page(ask, "transactions", _("Open transactions"), {"found": await ask.admin.waiting.transactions()})


async def pop(ask: Ask) -> Page:
    """Pending check points of POP, as far as one budget of a search goes."""
    return _page(ask, "pop", _("Popped messages"), {"found": await ask.admin.waiting.pops()})

"""Each cause of `rmq explain` on its page: cause, sentence, evidence, remedy, and a timeline in order.

The facts are the literals of `tests.admin.test_explain`; nothing is asked. The Explainer over real brokers is tested
there, and in `tests.interop`.
"""

from __future__ import annotations

import html
import re
from typing import Any

import pytest

from rmqkit.admin.diagnosis.causes import Cause, Facts, judge
from rmqkit.admin.diagnosis.timeline import timeline
from rmqkit.console import Console
from rmqkit.console.views import explain
from tests.admin.test_explain import CASES
from tests.console.asgi import Browser

BY_CAUSE: dict[Cause, Facts] = {cause: facts for facts, cause, _ in reversed(CASES.values())}
PATH = "/local/groups/billing/explain?topic=Orders&id=ID"


def shown(text: str) -> str:
    """The words of a page, as people read them."""
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", text)).split())


def words(text: object) -> str:
    return " ".join(str(text).split())


@pytest.mark.parametrize("cause", Cause)
async def test_a_cause_has_evidence_remedy_and_a_timeline_on_its_page(
    cause: Cause, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = BY_CAUSE[cause]
    told, events = judge(known), timeline(known)

    async def facts(*_: Any) -> Facts:
        return known

    monkeypatch.setattr(explain.Explainer, "facts", facts)
    async with Console("127.0.0.1:1") as console:
        browser = Browser(console)
        answer, values = await browser.get(PATH), await browser.json(PATH)
    assert answer.status == 200
    text = shown(answer.text)
    assert f"{cause.value} {words(told.sentence)}" in text
    assert f"What to do: {words(told.remedy)}" in text
    assert f"Evidence: {len(told.evidence)} facts" in text
    for fact in told.evidence:
        assert f"{fact.name} {words(fact.value)} {words(fact.source)}" in text
    told_in_order = answer.text.partition('<ol class="timeline">')[2]
    line = shown(told_in_order)
    places, end = [], 0
    for event in events:  # two events may begin alike: each is looked for behind the one before
        end = line.find(words(event.what), end) + 1
        places.append(end)
    assert 0 not in places, (places, line)
    times = re.findall(r'<time datetime="([^"]*)"', told_in_order)
    due = sum(event.is_due for event in events)
    past = times[: len(events) - due]
    assert past == sorted(past)
    assert answer.text.count("to come</span>") == due
    assert events or "Nothing of this message is stored" in text
    assert values["explanation"]["cause"] == cause.value
    assert values["explanation"]["remedy"] == told.remedy
    assert [fact["name"] for fact in values["explanation"]["evidence"]] == [fact.name for fact in told.evidence]
    assert [event["what"] for event in values["timeline"]] == [event.what for event in events]

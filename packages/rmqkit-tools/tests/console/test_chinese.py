"""Sentences that Python makes, in Chinese: no page is left with one in English."""

from __future__ import annotations

import html
import itertools
import re
from pathlib import Path
from typing import Any

import pytest

from rmqkit.admin.cluster.clients import FleetRow
from rmqkit.admin.diagnosis.causes import Cause, Facts, judge
from rmqkit.admin.diagnosis.health import Snapshot, findings
from rmqkit.admin.diagnosis.lite_causes import LiteCause
from rmqkit.admin.diagnosis.timeline import timeline
from rmqkit.console import Console
from rmqkit.console.alerts.rules import Alert, Rule
from rmqkit.console.html import translation
from rmqkit.console.html.render import _environment
from rmqkit.console.views import explain
from rmqkit.console.views.alerts import limit
from rmqkit.console.watch.figures import FIGURES
from rmqkit.protocol.schemas.brokers import HaConnectionInfo, HaRuntimeInfo
from rmqkit.sentences import _
from tests.admin.test_explain import CASES
from tests.admin.test_health import NOW, broker, group
from tests.console.asgi import Browser
from tests.console.pages import ENV, pages
from tests.console.test_explain_pages import PATH
from tests.console.test_pages import paths, shop
from tests.console.test_texts import ZH

ENGLISH = re.compile(r"[A-Za-z']+(?: [a-z']+){2,}")
"""Three words in a row; names and terms have fewer."""


def left(text: str) -> list[str]:
    """English that is left in a page, or a sentence: outside of commands, bodies, what somebody typed, and
    descriptions of settings that nobody has translated yet."""
    text = re.sub(r'<span lang="en">[^<]*</span>', " ", text)
    text = re.sub(r"<(code|pre|script|style|option|textarea)\b.*?</\1>", " ", text, flags=re.DOTALL)
    told = re.findall(r'\b(?:aria-label|title|data-label|data-text-[\w-]+)="([^"]*)"', text)
    bare = re.sub(r"rmq [a-z]+[^；，。)）]*", " ", html.unescape("\n".join((re.sub(r"<[^>]*>", "\n", text), *told))))
    return ENGLISH.findall(bare)


@pytest.mark.parametrize("name", CASES)
async def test_a_cause_is_explained_in_chinese(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    known, cause, _ = CASES[name]

    async def facts(*__: Any) -> Facts:
        return known

    monkeypatch.setattr(explain.Explainer, "facts", facts)
    async with Console("127.0.0.1:1") as console:
        answer = await Browser(console).get(PATH, ZH)
    assert answer.status == 200
    assert left(answer.text) == []
    assert translation.said(cause.value, "zh", is_term=True) in answer.text
    for said in (judge(known).sentence, *(one.what for one in timeline(known))):
        assert not left(translation.said(said, "zh")), said


def test_every_cause_has_a_chinese_name_and_remedy() -> None:
    for cause in (*Cause, *LiteCause):
        values = dict.fromkeys(re.findall(r"\{(\w+)\}", cause.remedy), "x")
        for text in (cause.value, _(cause.remedy, **values)):
            other = translation.said(text, "zh", is_term=True)
            assert re.search("[\u4e00-\u9fff]", other) and not left(other), other


def test_findings_are_reported_in_chinese() -> None:
    away = HaRuntimeInfo(master=True)
    behind = HaRuntimeInfo(master=True, ha_connection_info=[HaConnectionInfo(addr="s:1", diff=1 << 30)])
    silent = broker("b", row={"active": False, "disk_ratio": 0.9})
    silent.figures["brokerActive"] = "false"
    brokers = [
        broker(trouble=_("no answer in time")),
        silent,
        broker("d", ha=away),
        broker("d", 1),
        broker("e", ha=behind),
    ]
    brokers.append(broker("f", row={"version": "V4_9_7"}))
    changes = itertools.product((20_000, 1), (0, 1), (-9.0, 0.0, 3.0), (0, NOW - 720_000))
    lags = [
        group(lag=lag, late=1, members=members, trend=trend, behind_since_ms=since, dead=2, dead_grew=1)
        for lag, members, trend, since in changes
    ]
    lags += [group(dead=3, dead_last_ms=NOW - age_ms, dead_grew=grew) for age_ms in (5_000, 1 << 30) for grew in (0, 2)]
    lags += [group(popped=4, popped_grew=2, popped_since_ms=NOW - 60_000)]
    groups = {str(number): one for number, one in enumerate(lags)}
    brokers += [broker("g", skew_ms=9_000), broker("h", skew_ms=-90_000, half_since_ms=NOW - 300_000)]
    client = FleetRow(client_id="twice", language="JAVA", version=0, addresses=["h:1", "i:2"])
    told = findings(
        Snapshot(
            at_ms=NOW,
            brokers=brokers,
            groups=groups,
            clients=[client],
            name_servers={"h:9876": _("no answer in time")},
            gone=[broker("i").row],
        )
    )
    texts_of = {text for one in told for text in (one.text, one.remedy) if text}
    assert len(texts_of) > 30
    assert [other for text in texts_of if left(other := translation.said(text, "zh")) or other == text] == []


@pytest.mark.parametrize("figure", FIGURES)
def test_alerts_of_every_figure_are_reported_in_chinese(figure: str) -> None:
    rule = Rule(name="late", figure=figure, value=5)
    alert = Alert(rule="late", target="some-name", value=7.0, since_ms=NOW, seen_ms=NOW)
    for text in (limit(rule, alert), rule.words):
        other = translation.said(text, "zh")
        assert re.search("[\u4e00-\u9fff]", other) and "some-name" in other + "some-name" and not left(other), other


def test_a_setting_that_nobody_has_translated_is_marked_as_english() -> None:
    described = _environment("zh").filters["described"]
    assert described("probes & beeps of a broker") == '<span lang="en">probes &amp; beeps of a broker</span>'
    assert _environment("en").filters["described"]("probes & beeps") == "probes & beeps"
    assert re.search("[\u4e00-\u9fff]", described("address to listen on"))


async def test_no_page_has_an_english_sentence_left(tmp_path: Path) -> None:
    async with shop(tmp_path) as (both, _, browser):
        broker = both.broker.context.settings.broker_name
        more = [path for path in pages(broker).values() if path.startswith((f"/{ENV}/new-", f"/{ENV}/h", f"/{ENV}/a"))]
        more += [f"/{ENV}/groups/billing/{name}" for name in ("edit", "delete", "offsets", "dead")]
        more += [f"/{ENV}/topics/Orders/{name}" for name in ("edit", "delete")]
        more += [
            f"/{ENV}/{name}"
            for name in ("topics/Ordres", "nothing", "jobs", "dead", "new-channel", "history/lag/billing")
        ]
        more += [
            f"/{ENV}/brokers/{broker}/settings/edit?key=flushIntervalCommitLog",
            f"/{ENV}/topics/Orders/messages?from=x",
        ]
        found = {}
        for path in (*paths(broker), *more):
            answer = await browser.get(path, ZH)
            assert answer.status in (200, 400, 404), (path, answer.text[-2000:])
            if english := left(answer.text):
                found[path] = english
        assert not found

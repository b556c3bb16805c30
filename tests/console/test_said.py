"""Sentences that Python makes, in Chinese: each has its pattern, and no page is left with one in English."""

from __future__ import annotations

import ast
import html
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rmqkit
from rmqkit.admin.causes import Cause, Facts, judge
from rmqkit.admin.clients import FleetRow
from rmqkit.admin.health import Snapshot, findings
from rmqkit.admin.timeline import timeline
from rmqkit.console import Console, texts
from rmqkit.console.alerts import Alert, Rule
from rmqkit.console.figures import FIGURES
from rmqkit.console.views import explain
from rmqkit.console.views.alerts import limit
from rmqkit.protocol.schemas.brokers import HaConnectionInfo, HaRuntimeInfo
from tests.admin.test_explain import CASES
from tests.admin.test_health import NOW, broker, group
from tests.console.asgi import Browser
from tests.console.pages import ENV, pages
from tests.console.test_explain_pages import PATH
from tests.console.test_pages import paths, shop
from tests.console.test_texts import ZH

ROOT = Path(rmqkit.__file__).parent
TEXT = (ROOT / "console" / "zh_said.txt").read_text("utf-8")
LINES = [line.partition(" | ")[::2] for line in TEXT.splitlines()]
PLACE = r"\{[nw#]?\}"
NOT_SHOWN = {"doctor.py", "routes.py", "security.py", "serve.py", "survey.py", "top.py"}
"""Files whose sentences are of the command line, of the start, or of documents."""
PARTS = frozenset((
    "master of", "popped message", "read queue", "as the first of", "without keys", "{}, not", "JSON {}{}", "{} ms",
    "{} at {}", "at {}", " and {}", ", for {}", ", failed {}", "{} of {} {} {}", "{} is {}", "{} to {}", "SQL92 {}",
    "{} of topic {}: {}", "{} will be delivered {} {}", "{}, where {} is ({} online)", "{} began{}: {}{}",
    "{} does not answer{}: {}", "{} waits {}: {}", "{} holds it, {} {}, and has not finished it",
    ", the log has {} to {}",
    "{} {}: {} of {} {} is {} (limit {} {}) in cluster {}",
    ", which is past: the broker does not deliver, or its clock is behind",
))  # fmt: skip
"""Parts of sentences that have a pattern as a whole: the pages below show them."""
NEVER_SHOWN = frozenset((
    "a message that is in a queue has a place", "a dry run of a store is its command's", "For more", "console alerts",
    "console alerts to {}", "a view outside of any cluster asks for none", "plane {} of {} bytes in place of {}",
    "console history", "only a history with a file asks it", "without a folder there is no job", "console tail",
    "the console's own page {} must have letters, digits, - and _",
    "two hooks of the console have a page {}: rename one",
    "the console needs the name servers of a cluster: -n HOST:PORT", "users file {}: {}", "console watcher",
    "{}:{}: {} is not name:role:scrypt$…: rmq console user writes it", "public, max-age=3600",
    "console watcher: a round failed", "a retry has the key of its place", "dead letters go out as retries",
    r"(\d+) [dhms]",
))  # fmt: skip
"""Names of tasks, logs, what is said before a console starts."""
CODE = re.compile(r"(rmq |--|PRAGMA |SELECT |INSERT |UPDATE |DELETE |CREATE |attachment;|data: |event: |id: |Total :)")
ENGLISH = re.compile(r"[A-Za-z']+(?: [a-z']+){2,}")
"""Three words in a row; names and terms have fewer."""


def sentences(tree: ast.AST) -> Iterator[str]:
    """Texts of a module in their order, values as ``{}``; no documentation."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            yield "".join(one.value if isinstance(one, ast.Constant) else "{}" for one in node.values)
            for one in node.values:
                if isinstance(one, ast.FormattedValue):
                    yield from sentences(one)
        else:
            yield from sentences(node)


def shown(path: Path) -> set[str]:
    """The sentences of a module that people may see."""
    found = {one for one in sentences(ast.parse(path.read_text())) if " " in one.strip() and "<" not in one}
    found = {one for one in found if re.search("[a-z]{2}", one) and not re.search("%[srgd]", one)}
    return {one for one in found if not CODE.match(one.lstrip())} - PARTS - NEVER_SHOWN


def left(text: str) -> list[str]:
    """English that is left in a page, or a sentence: outside of commands, bodies and what somebody typed."""
    text = re.sub(r"<(code|pre|script|style|option|textarea)\b.*?</\1>", " ", text, flags=re.DOTALL)
    told = re.findall(r'\b(?:aria-label|title|data-label|data-text-[\w-]+)="([^"]*)"', text)
    bare = re.sub(r"rmq [a-z]+[^；，。)）]*", " ", html.unescape("\n".join((re.sub(r"<[^>]*>", "\n", text), *told))))
    return ENGLISH.findall(bare)


@pytest.mark.parametrize("folder", ["admin", "console"])
def test_every_sentence_of_python_has_its_chinese(folder: str) -> None:
    missing = []
    for path in sorted(set((ROOT / folder).rglob("*.py"))):
        for text in shown(path) if path.name not in NOT_SHOWN else ():
            numbers = iter(range(7001, 7100))
            filled = re.sub(r"\{\w*\}", lambda _: str(next(numbers)), text)  # noqa: B023
            other = texts.said(filled, "zh", is_word=True)
            is_whole = set(re.findall(r"7\d\d\d", filled)) <= set(re.findall(r"7\d\d\d", other))
            if re.search("[a-z]{2}", filled) and (other == filled or not is_whole or left(other)):
                missing.append((path.name, text, other))
    assert not missing, "add a line for each to src/rmqkit/console/zh_said.txt: ENGLISH | 中文"


def test_a_pattern_has_the_same_places_in_both() -> None:
    for english, chinese in LINES:
        count, places = len(re.findall(PLACE, english)), re.findall(r"\{(\d?)\}", chinese)
        in_order = sorted(places) == [str(number) for number in range(count)]
        assert chinese and (places == [""] * count or in_order), english
    keys = [english for english, _ in LINES]
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize(
    ("english", "chinese"),
    [
        ("its offset is 20, past 17.", "其消费位点是 20，已越过 17。"),
        (
            "Message 7F is deleted: queue 1 of T on b begins at 5 now; group g is not past it.",
            "消息 7F 已删除：b 上 T 的队列 1 现在从位点 5 开始；消费组 g 尚未越过它。",
        ),
        ("group a is 1,234 messages and 12 min behind", "消费组 a 堆积 1,234 条消息，落后 12 min"),
        ("broker-a (slave 1) does not answer: no answer in time", "broker-a（从节点 1）无应答：未及时应答"),
        ("Review: create topic", "复核：创建主题"),
        ("done", "done"),  # may be a name
        ("The sky is blue, see https://x.org", "The sky is blue, see https://x.org"),
        ("", ""),
    ],
)
def test_a_sentence_is_found_with_its_values(english: str, chinese: str) -> None:
    assert texts.said(english, "zh") == chinese
    assert texts.said(english, "en") == english


@given(
    st.one_of(
        st.text(), st.lists(st.sampled_from([*(e for e, _ in LINES), "; ", ": ", " ", ".", "x", "\0"])).map("".join)
    )
)
def test_any_text_may_come(text: str) -> None:
    assert isinstance(texts.said(text, "zh"), str)


@pytest.mark.parametrize("name", CASES)
async def test_a_cause_is_explained_in_chinese(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    known, cause, _ = CASES[name]

    async def facts(*_: Any) -> Facts:
        return known

    monkeypatch.setattr(explain.Explainer, "facts", facts)
    async with Console("127.0.0.1:1") as console:
        answer = await Browser(console).get(PATH, ZH)
    assert answer.status == 200
    assert left(answer.text) == []
    assert texts.said(cause.value, "zh", is_word=True) in answer.text
    for said in (judge(known).sentence, *(one.what for one in timeline(known))):
        assert not left(texts.said(said, "zh")), said


def test_every_cause_has_a_chinese_name_and_remedy() -> None:
    for cause in Cause:
        for text in (cause.value, cause.remedy.format(topic="T", group="G", broker="b")):
            other = texts.said(text, "zh", is_word=True)
            assert re.search("[\u4e00-\u9fff]", other) and not left(other), other


def test_findings_are_told_in_chinese() -> None:
    away = HaRuntimeInfo(master=True)
    behind = HaRuntimeInfo(master=True, ha_connection_info=[HaConnectionInfo(addr="s:1", diff=1 << 30)])
    silent = broker("b", row={"active": False, "disk_ratio": 0.9})
    silent.figures["brokerActive"] = "false"
    brokers = [
        broker(trouble="no answer in time"),
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
            name_servers={"h:9876": "no answer in time"},
            gone=[broker("i").row],
        )
    )
    texts_of = {text for one in told for text in (one.text, one.remedy) if text}
    assert len(texts_of) > 30
    assert [other for text in texts_of if left(other := texts.said(text, "zh")) or other == text] == []


@pytest.mark.parametrize("figure", FIGURES)
def test_alerts_of_every_figure_are_told_in_chinese(figure: str) -> None:
    rule = Rule(name="late", figure=figure, value=5)
    alert = Alert(rule="late", target="some-name", value=7.0, since_ms=NOW, seen_ms=NOW)
    for text in (limit(rule, alert), rule.words):
        other = texts.said(text, "zh")
        assert re.search("[\u4e00-\u9fff]", other) and "some-name" in other + "some-name" and not left(other), other


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

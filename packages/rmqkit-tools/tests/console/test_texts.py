"""Pages in Chinese, chosen by the browser or the switch; JSON stays as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from rmqkit.console.html import translation
from rmqkit.sentences import _
from tests.console.asgi import served

ZH = {"accept-language": "zh-CN,zh;q=0.9,en;q=0.5", "accept": "text/html"}


def test_a_sentence_is_translated_with_the_sentences_in_it() -> None:
    found = _("group {group} is past it: {at}", group="g", at="its offset")
    assert translation.said(found, "en") is found
    queue = _("queue {queue} of {topic} on {broker}", queue=1, topic="T", broker="b")
    what = _("{client} has no lock of {queue}", client="c", queue=queue)
    assert translation.said(what, "zh") == "c 没有 b 上 T 的队列 1 的锁"


def test_a_text_that_nobody_marked_stays() -> None:
    assert translation.said("done", "zh") == "done"
    assert translation.said("topic T deleted", "zh") == "topic T deleted"
    assert translation.said("done", "zh", is_term=True) == "完成"
    assert translation.said("Orders", "zh", is_term=True) == "Orders"
    assert translation.said("", "zh", is_term=True) == ""


def test_a_sentence_with_a_part_that_has_no_translation_is_whole_english() -> None:
    inner = _("no such {what}", what="text in the catalogue")
    assert translation.said(inner, "zh") == "no such text in the catalogue"
    outer = _("{request} to {broker}", request=inner, broker="b")
    assert translation.said(_("{request} to {broker}", request="R", broker="b"), "zh") == "R 到 b"
    assert translation.said(outer, "zh") == "no such text in the catalogue to b"


def test_values_stay_as_they_are() -> None:
    for name in ("{x}", "done", "topic T deleted", "<b>", "\0"):
        found = translation.said(_("topic {topic} deleted", topic=name), "zh")
        assert found == f"已删除主题 {name}"


@pytest.mark.parametrize(
    ("cookie", "accepted", "language"),
    [
        ("", "", "en"),
        ("", "zh-TW", "zh"),
        ("", "de, ZH;q=0.5, en;q=0.1", "zh"),
        ("", "en-US,zh", "en"),
        ("en", "zh", "en"),
        ("xx", "zh", "zh"),
    ],
)
def test_which_language(cookie: str, accepted: str, language: str) -> None:
    assert translation.chosen(cookie, accepted) == language


async def test_pages_are_in_the_language_that_was_chosen_and_json_is_not(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, _, browser):
        english, chinese = await browser.get("/local/topics"), await browser.get("/local/topics", ZH)
        assert '<html lang="en"' in english.text and ">Dead letters</a>" in english.text
        assert '<html lang="zh-CN"' in chinese.text and ">死信</a>" in chinese.text and "<h1>主题</h1>" in chinese.text
        as_json = {"accept": "application/json"}
        for path in ("/local/topics?kind=retry", "/local/waiting/delays", "/about"):
            ours, theirs = await browser.get(path, as_json), await browser.get(path, ZH | as_json)
            assert set(ours.json()) == set(theirs.json()) and ours.json()["title"] == theirs.json()["title"]
        assert (await browser.get("/local/waiting/transactions", ZH)).status == 200
        answer = await browser.post("/theme", {"lang": "zh", "back": "/local/topics"})
        assert (answer.status, answer.headers["location"]) == (303, "/local/topics")
        assert "<h1>主题</h1>" in (await browser.get("/local/topics")).text
        async with browser.stream("/events?path=/local/waiting/pop") as events:
            assert "不可见消息" in await events.get()

"""Chinese: every text of every template, chosen by the browser or the switch; JSON stays as it is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import rmqkit.console
from rmqkit.console import texts
from tests.console.asgi import served

FOLDER = Path(rmqkit.console.__file__).parent
TEMPLATES = sorted((FOLDER / "templates").glob("*.html"))
ZH = {"accept-language": "zh-CN,zh;q=0.9,en;q=0.5", "accept": "text/html"}


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_every_text_of_a_template_is_there(path: Path) -> None:
    missing = [text for text in texts.texts_of(path.read_text()) if text not in texts.catalogue("zh")]
    assert not missing, "add a line for each to src/rmqkit/console/zh.txt: ENGLISH | 中文"


def test_no_text_is_left_over_or_twice() -> None:
    used = {text for path in TEMPLATES for text in texts.texts_of(path.read_text())}
    lines = (FOLDER / "zh.txt").read_text("utf-8").splitlines()
    templates, _, titles = (FOLDER / "zh.txt").read_text("utf-8").partition("\n\n")
    assert {line.partition(" | ")[0] for line in templates.splitlines()} <= used
    keys = [line.partition(" | ")[0] for line in lines if line]
    assert len(keys) == len(set(keys))
    views = "".join(path.read_text() for path in (*FOLDER.rglob("*.py"), FOLDER.parent / "admin" / "stores.py"))
    assert all(f'"{line.partition(" | ")[0]}"' in views for line in titles.splitlines() if line)


def test_placeholders_of_templates_are_the_same_in_both() -> None:
    for path in TEMPLATES:
        source = path.read_text()
        found = texts.translated(source, "zh")
        assert texts.translated(source, "en") == source
        for pattern in (r"</?\w+", r'(?:href|class|name|id|value|action)="[^"]*"', r"\{%-? *\w+"):
            assert re.findall(pattern, found) == re.findall(pattern, source), path.name


def test_keys_of_values_are_no_texts() -> None:
    source = '{{ counts["given up"] }}{{ {"given up": "bad"}.get(state, "not known") }}{{ m.empty("None here.") }}'
    assert texts.texts_of(source) == ["not known", "None here."]


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
    assert texts.chosen(cookie, accepted) == language


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

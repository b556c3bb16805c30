"""Commands on pages: they are quoted, so that a person can paste them with any names in them."""

from __future__ import annotations

import html
import re
import shlex
from pathlib import Path
from urllib.parse import urlencode

import pytest

import rmqkit.console
from rmqkit.admin import Admin
from rmqkit.console.html.render import shell
from tests.console.asgi import Answer, served
from tests.console.test_changes import token_of

NAME = "it's mine; $(date) `id` | & <b>"


def commands(answer: Answer) -> list[list[str]]:
    """The words that a shell makes of each command on a page."""
    shown = (html.unescape(one) for one in re.findall(r"<code>(rmq [^<]*)</code>", answer.text))
    return [shlex.split(one) for one in shown]


def test_each_word_is_quoted_and_the_command_is_not() -> None:
    assert shell("rmq tail", "Orders", "--key", "two words") == "rmq tail Orders --key 'two words'"
    assert shlex.split(shell("rmq tail", NAME, 7)) == ["rmq", "tail", NAME, "7"]


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("topics/Orders/messages?" + urlencode({"key": NAME}), ["rmq", "message", "by-key", "Orders", NAME]),
        ("groups/billing/explain?" + urlencode({"topic": "Orders", "key": NAME}),
         ["rmq", "explain", "Orders", "billing", "--key", NAME]),
        ("filter?" + urlencode({"expression": NAME}), ["rmq", "filter", "test", NAME]),
        ("access/" + "it%27s%20mine" + "/edit", ["rmq", "user", "update", "it's mine"]),
    ],
)  # fmt: skip
async def test_a_page_quotes_the_names_in_its_command(tmp_path: Path, path: str, words: list[str]) -> None:
    async with served(tmp_path) as (both, _, browser), Admin(both.namesrv_address) as admin:
        await admin.topics.create("Orders", read_queues=1, write_queues=1)
        await admin.groups.update("billing", {})
        await admin.access.create_user("it's mine", "secret-of-it")
        assert words in commands(await browser.get(f"/local/{path}"))


async def test_a_review_and_its_result_quote_what_was_typed(tmp_path: Path) -> None:
    async with served(tmp_path) as (both, _, browser), Admin(both.namesrv_address) as admin:
        await admin.topics.create("Orders", read_queues=1, write_queues=1)
        review = await browser.post("/local/topics/Orders/send", {"body": "x", "tags": "it's new"})
        done = await browser.post("/local/topics/Orders/send", {"review": token_of(review)})
        for answer in (review, done):
            assert ["rmq", "send", "Orders", "BODY", "--tags", "it's new"] in commands(answer)


def test_views_and_templates_make_no_command_without_quoting() -> None:
    folder = Path(rmqkit.console.__file__).parent
    sources = {path: path.read_text() for kind in ("views/*.py", "html/templates/*.html") for path in folder.glob(kind)}
    assert sum("shell(" in text for text in sources.values()) > 10
    assert [
        path.name for path, text in sources.items() if re.search(r"""f["']rmq |["']rmq [^"']*["'] *[~+]""", text)
    ] == []

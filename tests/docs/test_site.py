"""The site builds without a warning, is complete, and fetches nothing from other hosts."""

from __future__ import annotations

import html
import importlib
import inspect
import os
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator

import msgspec
import pytest
import typer
from docs.fields import fields_table, has_fields
from docs.generate import API, FOLDER, GROUPS, PAGES, public_names

import rmqkit
from rmqkit.cli import app
from rmqkit.errors import ExitCode
from rmqkit.metrics import TABLE
from rmqkit.protocol.catalog import CATALOG
from rmqkit.settings import setting_table
from tests.docs.pages import ROOT

_BUILD_SECONDS_MAX = 900


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return pages, style sheets and the search index by path. Warnings of mkdocs, as for broken links, are errors."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=_BUILD_SECONDS_MAX, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    files = (path for path in folder.rglob("*") if path.suffix in (".html", ".css") or path.name == "search_index.js")
    return {path.relative_to(folder).as_posix(): path.read_text() for path in files}


def text_of(page: str) -> str:
    """Return the text of a page's article."""
    article = re.search(r"<article.*?>(.*)</article>", page, re.DOTALL)
    return html.unescape(re.sub(r"<[^>]+>", "", article[1] if article else page))


@pytest.mark.slow
@pytest.mark.timeout(_BUILD_SECONDS_MAX)
def test_a_reader_fetches_nothing_from_other_hosts(site):
    for name, page in site.items():
        fetched = r"<(?:script|img|iframe|link)\b[^>]*?\b(?:src|href)=\"?(https?:)?//|(@import|url\()\W*(https?:)?//"
        assert not re.search(fetched, page), f"{name} loads something from elsewhere"


@pytest.mark.slow
@pytest.mark.timeout(_BUILD_SECONDS_MAX)
def test_the_site_says_nothing_of_the_machine_that_built_it(site):
    for name, page in site.items():
        assert str(ROOT) not in page, f"{name} names {ROOT}"


@pytest.mark.parametrize("name", PAGES)
def test_a_generated_page_is_up_to_date(name, caplog):
    with caplog.at_level("CRITICAL"):  # most requests of the probe are refused, and the broker logs this
        assert (FOLDER / name).read_text(encoding="utf-8") == PAGES[name](), "run `make docs`"


def _modules() -> Iterator[object]:
    for found in pkgutil.walk_packages(rmqkit.__path__, "rmqkit."):
        if found.name != "rmqkit.__main__":
            yield importlib.import_module(found.name)


@pytest.mark.slow
def test_every_setting_is_in_the_site(site):
    shown = text_of(site["reference/settings.html"])
    for module in _modules():
        for declared in vars(module).values():
            is_struct = isinstance(declared, type) and issubclass(declared, msgspec.Struct)
            if is_struct and "Setting(" in "".join(map(str, inspect.get_annotations(declared).values())):
                missing = [key for key in setting_table(declared) if key not in shown]
                assert not missing, f"settings of {declared.__name__} that no page has: {missing}"


@pytest.mark.slow
def test_every_code_metric_and_exit_code_is_in_the_site(site):
    codes = text_of(site["reference/codes.html"])
    assert [one.name for one in CATALOG.values() if one.name not in codes] == []
    assert re.search(r"310\s+SEND_MESSAGE_V2\s+broker\s+broker\s", codes), "the probe reached the broker"
    metrics = text_of(site["reference/metrics.html"])
    assert [one.exposed_name for one in TABLE if one.exposed_name not in metrics] == []
    rows = re.findall(r"<tr>\s*<td><code>(\d+)</code>", site["reference/exit-codes.html"])
    assert [int(row) for row in rows] == [int(code) for code in ExitCode]


def _commands(command: object, path: str) -> Iterator[str]:
    yield path
    context = typer.Context(command)
    for name in command.list_commands(context) if hasattr(command, "list_commands") else ():
        below = command.get_command(context, name)
        if not below.hidden:
            yield from _commands(below, f"{path} {name}")


@pytest.mark.slow
def test_every_command_is_in_the_site(site):
    shown = text_of(site["reference/cli.html"])
    # The commands of rmq admin have mqadmin's names: they are aliases of the same commands, as reference/mqadmin.md
    # says.
    paths = [path for path in _commands(typer.main.get_command(app), "rmq") if not path.startswith("rmq admin ")]
    assert [path for path in paths if path not in shown] == [], "run `make docs`"


@pytest.mark.slow
@pytest.mark.parametrize("page", API)
def test_every_public_name_is_in_the_site_and_says_what_it_is(site, page):
    shown = site[f"reference/api/{page}.html"]
    for module in API[page][2]:
        for name, home in public_names(module).items():
            assert f'id="{home}"' in shown, f"{module}.{name} is not on the page"
            value = getattr(importlib.import_module(module), name)
            if callable(value) and isinstance(value, type) | hasattr(value, "__code__"):
                assert value.__doc__, f"{home} has no docstring"


def test_every_field_of_a_client_class_says_what_it_means():
    kinds = [value for name in rmqkit.__all__ if has_fields(value := getattr(rmqkit, name))]
    rows = [row for kind in kinds for row in fields_table(kind)]
    assert len(rows) > 200
    assert [row for row in rows if row.endswith("|  |")] == []


@pytest.mark.slow
def test_every_field_of_settings_and_results_is_in_the_site(site):
    shown = text_of(site["reference/api/rmqkit.html"])
    for name in ("ProducerSettings", "PushConsumerSettings", "PullConsumerSettings", "SendResult", "ReceivedMessage"):
        fields = getattr(rmqkit, name).__struct_fields__
        assert [field for field in fields if not re.search(rf"^\s*{field}(\.\w+)?$", shown, re.MULTILINE)] == [], name


def test_names_in_the_groups_of_the_class_reference_exist():
    grouped = [name for names in GROUPS.values() for name in names]
    assert sorted(grouped) == sorted(set(grouped)), "each name is in one group"
    assert [name for name in grouped if name not in rmqkit.__all__] == []


_NOTE = re.compile(r"\b(behaviour|store|remoting|grpc|spark|failover|lite|console|style|layout|design)\.md §")


def test_pages_link_to_sections_in_place_of_naming_files():
    pages = [*FOLDER.rglob("*.md"), ROOT / "README.md", ROOT / "CHANGELOG.md"]
    assert [str(page) for page in pages if _NOTE.search(page.read_text(encoding="utf-8"))] == []


@pytest.mark.slow
@pytest.mark.timeout(_BUILD_SECONDS_MAX)
def test_every_table_is_a_table(site):
    assert [name for name, page in site.items() if name.endswith(".html") and "|---|" in text_of(page)] == []


@pytest.mark.slow
def test_the_specification_is_searched(site):
    assert "spec/store.html#s3-1" in site["search/search_index.js"]


@pytest.mark.slow
@pytest.mark.timeout(_BUILD_SECONDS_MAX)
def test_the_search_works_from_a_folder(site):
    """A page from a folder cannot start the search worker. docs/javascripts/iframe-worker.js replaces it."""
    assert 'src="javascripts/iframe-worker.js"' in site["index.html"]
    assert "offline" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


@pytest.mark.slow
def test_every_decision_is_in_the_menu(site):
    menu = site["index.html"]
    for decision in (ROOT / "docs/decisions").glob("*.md"):
        assert f"decisions/{decision.stem}.html" in menu, decision.name

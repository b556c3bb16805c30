"""The fixtures, as projects use them: each test here runs pytest over a small test file of its own."""

from __future__ import annotations

import importlib

import pytest

pytest_plugins = ["pytester"]

for module in ("lark", "rmqkit.sync", "rmqkit.testing.cluster"):
    importlib.import_module(module)  # the runs below drop what they import, so that each would import it again

FIXTURES = """
import asyncio
import pytest
from rmqkit import Message, Producer, PushConsumer, sync

def test_sync(rmq_broker, rmq_topic, rmq_group, rmq_producer, rmq_consumer):
    assert type(rmq_producer) is sync.Producer and type(rmq_consumer) is sync.PushConsumer
    seen = []
    rmq_consumer.subscribe(rmq_topic, handler=lambda message: seen.append(message.body))
    for body in (b"1", b"2"):
        rmq_producer.send(Message(topic=rmq_topic, body=body))
    rmq_broker.assert_consumed(rmq_group, rmq_topic, count=2)
    assert sorted(seen) == [b"1", b"2"]

@pytest.fixture
def anyio_backend():
    return "asyncio"

@pytest.mark.anyio
async def test_async(rmq_broker, rmq_topic, rmq_group, rmq_producer, rmq_consumer):
    assert type(rmq_producer) is Producer and type(rmq_consumer) is PushConsumer
    seen = []

    @rmq_consumer.on(rmq_topic)
    async def handle(message):
        seen.append(message.body)

    async with rmq_producer, rmq_consumer:
        await rmq_producer.send(Message(topic=rmq_topic, body=b"1"))
        with pytest.raises(RuntimeError, match="asyncio.to_thread"):
            rmq_broker.assert_consumed(rmq_group, rmq_topic)
        await asyncio.to_thread(rmq_broker.assert_consumed, rmq_group, rmq_topic)
    assert seen == [b"1"]
"""


@pytest.fixture
def run(pytester):
    def runner(text, *options, ini=""):
        pytester.makeini(f"[pytest]\nfilterwarnings = error\naddopts = --strict-markers\n{ini}\n")
        pytester.makepyfile(text)
        return pytester.runpytest_inprocess("-p", "no:cacheprovider", "-p", "no:hypothesispytest", *options)

    return runner


def test_a_console_beside_the_broker(run):
    text = """
import json
import urllib.request

def page(address, path):
    with urllib.request.urlopen(f"{address}{path}?format=json", timeout=60) as answer:
        return json.load(answer)

def test_topics(rmq_broker, rmq_topic, rmq_console):
    (broker,) = page(rmq_console, "local/brokers")["brokers"]
    assert broker["addr"] == rmq_broker.brokers[0].address
    assert page(rmq_console, f"local/topics/{rmq_topic}")["name"] == rmq_topic
"""
    run(text).assert_outcomes(passed=1)


@pytest.mark.parametrize("mode", ["fresh", "shared"])
def test_fixtures_fit_sync_and_async_tests(run, mode):
    run(FIXTURES, ini=f"rmq_broker = {mode}").assert_outcomes(passed=2)


def test_a_failed_assert_reports_its_text_and_the_seed_of_the_chaos(run):
    result = run(
        """
def test_consumed(rmq_broker, rmq_topic):
    rmq_broker.chaos(busy=0.25, delay=0.5, seed=42)
    rmq_broker.assert_consumed("billing", rmq_topic, timeout=0)
"""
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "E *AssertionError: after 0 s topic test_consumed-* does not hold any messages: it holds 0",
            "*- rmq chaos -*",
            "chaos(busy=0.25, delay=0.5, seed=42) did nothing yet",
        ]
    )


SHARED = """
import pytest

brokers = {}

def test_first(rmq_broker, rmq_topic, rmq_group):
    brokers[rmq_broker.name_server] = {rmq_topic, rmq_group}
    rmq_broker.chaos(busy=1)

def test_second(rmq_broker, rmq_topic, rmq_group):
    names = brokers[rmq_broker.name_server]
    assert len(names | {rmq_topic, rmq_group}) == 4
    assert not rmq_broker.brokers[0].dials.dials

@pytest.mark.parametrize("text", ["a b/c" * 40])
def test_names_are_legal(rmq_topic, rmq_group, text):
    assert max(len(rmq_topic), len(rmq_group)) < 120

@pytest.mark.rmq(fresh=True)
def test_marked(rmq_broker):
    assert rmq_broker.name_server not in brokers

@pytest.mark.rmq(settings={"autoCreateTopicEnable": False})
def test_configured(rmq_broker):
    assert not rmq_broker.masters()[0].settings.auto_create_topic

def test_timed(rmq_broker, rmq_clock):
    assert rmq_broker.name_server not in brokers

def test_clustered(rmq_cluster):
    assert len(rmq_cluster.brokers) == 2
"""


def test_tests_share_a_broker_unless_they_ask_for_more(run):
    run(SHARED, ini="rmq_broker = shared").assert_outcomes(passed=7)


def test_each_test_has_a_broker_of_its_own(run):
    run(
        """
import pytest

seen = set()

@pytest.mark.parametrize("number", [1, 2])
def test_one(rmq_broker, number):
    seen.add(rmq_broker.name_server)
    assert len(seen) == number
"""
    ).assert_outcomes(passed=2)


def test_what_is_misspelt_is_reported(run):
    result = run("import pytest\n@pytest.mark.rmq(broker=2)\ndef test_one(rmq_broker): pass\n")
    result.stdout.fnmatch_lines(
        ["the marker is rmq(broker=2): it has to be rmq(fresh=False, brokers=1, slaves=0, settings={}): what *"]
    )
    result = run("def test_one(rmq_broker): pass\n", ini="rmq_broker = once")
    result.stderr.fnmatch_lines(["ERROR: ini option rmq_broker is 'once': give fresh or shared"])


def test_the_plugin_costs_next_to_nothing_until_it_is_used(pytester):
    """Loaded by its entry point, it brings three modules along, and has pytest leave the others as they are."""
    pytester.makepyfile(
        """
import sys

def test_one(request):
    assert request.config.pluginmanager.has_plugin("rmqkit")
    assert sorted(name for name in sys.modules if name.partition(".")[0] == "rmqkit") == [
        "rmqkit", "rmqkit.testing", "rmqkit.testing.plugin"
    ]
    import rmqkit.clock
    assert type(rmqkit.clock.__loader__).__module__ == "_frozen_importlib_external", "its asserts are not rewritten"
"""
    )
    pytester.runpytest_subprocess("-p", "no:cacheprovider", "-p", "no:hypothesispytest").assert_outcomes(passed=1)

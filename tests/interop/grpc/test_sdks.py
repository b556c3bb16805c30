"""Apache's SDKs for gRPC with our endpoints and with Apache's proxy 5.5.0: their output must be the same everywhere.

| Place | Server |
|---|---|
| ``broker`` | the endpoint inside our broker; at the end it is stopped and started again under load |
| ``apache`` | Apache's proxy in local mode, a broker in its own process |
| ``proxy`` | `rmq proxy` in front of that broker |

The programs and scenarios are those of `tests.interop.sdks.programs`. All languages run at the same time.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from rmqkit import Compressing, CompressionType, Message, Producer, ProducerSettings, PullConsumer
from rmqkit.admin import Admin
from tests.faults.grpc_broker import GrpcBroker
from tests.interop.apache import HOST
from tests.interop.conftest import _startup_lines
from tests.interop.go_and_node import complete
from tests.interop.grpc.apache_proxy import PROXY_BROKER_CONF
from tests.interop.grpc.scene import Place
from tests.interop.kit import Unavailable
from tests.interop.sdks.first_lines import command_of
from tests.interop.sdks.programs import LOAD, SDKS, Program, Running
from tests.interop.server_process import ServerProcess, wait_until
from tests.interop.standalone import READY_SECONDS, RMQ
from tests.waiting import SECONDS

RUN_SECONDS = 150.0
TOPICS = {"fifo": "FIFO", "delay": "DELAY", "transaction": "TRANSACTION"} | dict.fromkeys(
    ("plain", "invisible", "filters", "retries", "crossed", "long", "load"), "NORMAL"
)
# Apache's proxy 5.5 refuses a consumer whose group does not exist.
GROUPS = ("plain", "invisible", "tags", "sql", "delay", "transaction", "crossed", "dead-fifo", "dead-retries")
EVERY_SECOND = {
    "type": "EXPONENTIAL",
    "exponentialRetryPolicy": {"initial": 1000, "max": 1000, "multiplier": 1},
}
IN_ORDER: Mapping[str, Mapping[str, Any]] = {
    "java": {},
    "go": {"group_retry_policy": EVERY_SECOND},
    "node": {"group_retry_policy": EVERY_SECOND},  # the SDK supports no other kind
    "python": {},  # the SDK reads the number of attempts only from this kind
}
COMPRESSED = 5000

# The results of the scenarios, the same for all places, and the deviations of single SDKs.
EXPECTED: Mapping[str, Mapping[str, Any]] = {
    "plain": {"message": ["hello", "a", ["k1", "k2"], {"x": "y"}, 1], "same id": True},
    "invisible": {"attempts": [1, 2], "body": "changed"},
    "filters": {"tags": ["one", "three"], "sql": ["two"]},
    "fifo": {
        "came": [
            *(["f0", 1], ["f1", 1], ["fails once", 1], ["fails once", 2], ["f3", 1], ["f4", 1]),
            *(["fails", 1], ["fails", 2], ["f6", 1]),
        ],
        "dead": ["fails"],
    },
    "delay": {"came": ["due", "past"], "early": False, "recalled": True},
    "transaction": {"came": ["checked", "commit"], "asked": ["checked", "dropped"]},
    "retries": {
        "came": [["fails", 1], ["fails", 2], ["fails once", 1], ["fails once", 2]],
        "dead": ["fails"],
    },
}
SCENARIOS = tuple(EXPECTED)
CROSSED = {"came": [[kind, COMPRESSED] for kind in ("lz4 ", "zlib", "zstd")]}
OTHERWISE: Mapping[tuple[str, str], Mapping[str, Any]] = {
    # Version 5.1.4 continues with the next message while it waits to retry one: second attempts arrive anywhere.
    ("go", "fifo"): {
        "came": [
            *(["f0", 1], ["f1", 1], ["fails once", 1], ["f3", 1], ["f4", 1]),
            *(["fails", 1], ["f6", 1], ["fails", 2], ["fails once", 2]),  # these two in any order
        ]
    },
    # Version 5.1.2 does not count its own attempts.
    ("python", "fifo"): {
        "came": [
            *(["f0", 1], ["f1", 1], ["fails once", 1], ["fails once", 1], ["f3", 1], ["f4", 1]),
            *(["fails", 1], ["fails", 1], ["f6", 1]),
        ]
    },
}
REFUSED = {
    "type": r"[Cc]urrent message type not match with (topic|queue) accept message types",
    "topic": r"CODE: 17  DESC: No topic route info in name server for the topic: \S+-nowhere\nFor more information",
}
REFUSED_OTHERWISE = {"python": {"topic": r"failed to fetch topic:\S+-nowhere route"}}


class Told:
    """The output of the programs at one place, by language and scenario.

    Attributes:
        long: the long body of a language as read by clients of the other protocol.
        broker: the running broker.
        went_on: seconds from a broker's ready line to a message sent after it, by language and kind of consumer.
    """

    def __init__(self, running: Mapping[str, Running], missing: Mapping[str, str]) -> None:
        self.running = running
        self._missing = missing
        self.broker: GrpcBroker | None = None
        self.long: dict[str, str] = {}
        self.went_on: dict[str, dict[str, float]] = {}

    def facts(self, language: str, scenario: str) -> Any:
        """Return the output of a scenario. Skip the test if the language is missing."""
        if language in self._missing:
            pytest.skip(self._missing[language])
        return self.running[language].facts(scenario)

    def read_long(self, place: str, name_server: str) -> None:
        topics = (f"{place}-{language}-long" for language in self.running)
        self.long = dict(zip(self.running, asyncio.run(bodies_in(name_server, *topics)), strict=True))

    def finish(self) -> None:
        """Wait until all programs have reported all scenarios that end. The test of a late scenario reports the
        failure.
        """
        with suppress(TimeoutError):
            wait_until(lambda: all(one.has_told(*SCENARIOS) for one in self.running.values()), RUN_SECONDS, "scenarios")


class Languages:
    """The programs that this machine can run, and the reasons why it cannot run others."""

    def __init__(self) -> None:
        self.programs: dict[str, Program] = {}
        self.missing: dict[str, str] = {}
        with ThreadPoolExecutor(len(SDKS)) as threads:
            prepared = {language: threads.submit(prepare) for language, prepare in SDKS.items()}
        for language, one in prepared.items():
            try:
                self.programs[language] = one.result()
            except Unavailable as reason:
                if language == "java" and os.environ.get("RMQKIT_INTEROP") == "require":
                    raise
                self.missing[language] = str(reason)

    def start(self, stack: ExitStack, place: str, endpoint: str, home: Path, *more: str) -> Told:
        """Start all programs with the scenarios of every place, and with ``more``."""
        running = {}
        for language, program in self.programs.items():
            prefix = f"{place}-{language}"
            one = Running(program, home / prefix, endpoint, prefix, *SCENARIOS, "refused", *more)
            running[language] = stack.enter_context(one)
        return Told(running, self.missing)

    async def make(self, place: str, name_server: str, broker: str) -> None:
        """Create the topics and groups of all programs, and send messages of the other protocol."""
        async with Admin(name_server) as admin:
            for language in self.programs:
                prefix = f"{place}-{language}"
                for topic, kind in TOPICS.items():
                    how = {"read_queues": 2, "write_queues": 2, "attributes": f"+message.type={kind}"}
                    await admin.topics.create(f"{prefix}-{topic}", broker=broker, **how)
                for group in GROUPS:
                    await admin.groups.update(f"{prefix}-{group}", {}, broker)
                changes = {"consume_message_orderly": True, "retry_max_times": 1, **IN_ORDER[language]}
                await admin.groups.update(f"{prefix}-fifo", changes, broker)
                await admin.groups.update(f"{prefix}-retries", {"retry_max_times": 1}, broker)
        for kind in CompressionType:
            body = f"{kind.name.lower():4}".ljust(COMPRESSED).encode()
            async with Producer(
                "compressing", name_server, settings=ProducerSettings(compression=Compressing(type=kind))
            ) as sender:
                for language in self.programs:
                    await sender.send(Message(topic=f"{place}-{language}-crossed", body=body))


async def bodies_in(name_server: str, *topics: str) -> list[str]:
    """Return the bodies of each topic, joined, as a client of the other protocol reads them."""
    found = []
    async with PullConsumer("reading", name_server) as consumer:
        for topic in topics:
            bodies = []
            for queue in await consumer.queues(topic):
                bodies += [message.body.decode() for message in (await consumer.pull(queue, 0)).messages]
            found.append("".join(bodies))
    return found


@pytest.fixture(scope="module")
def languages() -> Languages:
    return Languages()


@pytest.fixture(scope="module")
def at_broker(languages: Languages, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Told]:
    """Run the programs with our broker's endpoint, and restart it while they send and receive."""
    home = tmp_path_factory.mktemp("broker")
    with ExitStack() as stack:
        broker = GrpcBroker(home, PROXY_BROKER_CONF)
        stack.callback(broker.kill)
        broker.start()
        asyncio.run(broker.make({"Orders": "NORMAL"}))
        asyncio.run(languages.make("broker", broker.name_server, broker.broker))
        told = languages.start(stack, "broker", broker.address, home, "crossed", "load")
        told.finish()
        told.read_long("broker", broker.name_server)
        stopped = time.monotonic()
        broker.stop()
        broker.start()
        ready, ready_ms = time.monotonic(), time.time() * 1000
        programs = told.running.values()
        with suppress(TimeoutError):
            wait_until(lambda: all(one.first_since(ready_ms).keys() == set(LOAD) for one in programs), SECONDS, "load")
        told.went_on = {
            language: {way: at - ready for way, at in one.first_since(ready_ms).items()}
            for language, one in told.running.items()
        }
        seconds = {language: f"{max(ways.values(), default=SECONDS):.1f}" for language, ways in told.went_on.items()}
        _startup_lines.append(f"rmq standalone: away for {ready - stopped:.2f} s, then SDKs went on after s: {seconds}")
        for running in told.running.values():
            running.end_load()
        for running in told.running.values():
            with suppress(TimeoutError):
                wait_until(lambda running=running: running.has_told("load"), RUN_SECONDS, "the end of the load")
        told.broker = broker
        yield told


@pytest.fixture(scope="module")
def at_apaches(
    apache_proxy: Place, languages: Languages, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Told]]:
    """Run the programs with Apache's proxy and, at the same time, with `rmq proxy` in front of the same broker."""
    home = tmp_path_factory.mktemp("apaches")
    names, broker = apache_proxy.namesrv_addr, apache_proxy.broker_addr
    with ExitStack() as stack:
        command = [RMQ, "proxy", "-n", names, "--port", "0", "--host", HOST]
        process = stack.enter_context(ServerProcess(command, home / "proxy.log"))
        for place in ("apache", "proxy"):
            asyncio.run(languages.make(place, names, broker))
        endpoint = process.wait_ready(r"^ready grpc=(\S+)", READY_SECONDS)[1]
        told = {
            "apache": languages.start(stack, "apache", apache_proxy.grpc_addr, home),
            "proxy": languages.start(stack, "proxy", endpoint, home, "crossed"),
        }
        for one in told.values():
            one.finish()
        told["proxy"].read_long("proxy", names)
        yield told


@pytest.fixture(scope="module", params=["broker", "apache", "proxy"])
def told(request: pytest.FixtureRequest) -> Told:
    if request.param == "broker":
        return request.getfixturevalue("at_broker")
    return request.getfixturevalue("at_apaches")[request.param]


@pytest.fixture(params=SDKS)
def language(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_an_sdk_sees_the_same_of_every_place(told: Told, language: str, scenario: str) -> None:
    facts = told.facts(language, scenario)
    if (language, scenario) == ("go", "fifo"):
        facts = facts | {"came": sorted(facts["came"], key=lambda one: (one[1], one[0] if one[1] > 1 else ""))}
    if scenario == "retries":
        facts = facts | {"came": sorted(facts["came"])}
    if scenario == "transaction":  # a slow client may be asked before it ends a transaction itself
        facts = facts | {"asked": [body for body in facts["asked"] if body in ("checked", "dropped")]}
    assert facts == EXPECTED[scenario] | OTHERWISE.get((language, scenario), {})


def test_messages_of_another_type_and_unknown_topics_are_refused(told: Told, language: str) -> None:
    facts = told.facts(language, "refused")
    for what, pattern in (REFUSED | REFUSED_OTHERWISE.get(language, {})).items():
        assert re.search(pattern, facts[what]), facts


@pytest.mark.parametrize("told", ["broker", "proxy"], indirect=True)
def test_an_sdk_reads_what_the_other_protocol_compressed(told: Told, language: str) -> None:
    assert told.facts(language, "crossed") == CROSSED


@pytest.mark.parametrize("told", ["broker", "proxy"], indirect=True)
def test_the_other_protocol_reads_long_bodies_of_an_sdk(told: Told, language: str) -> None:
    told.facts(language, "crossed")
    body = told.long[language]
    assert body == f"{body.partition(' ')[0]} " * 4000
    assert body.endswith(f"-{language} ")


@pytest.mark.parametrize("told", ["broker"], indirect=True)
def test_an_sdk_continues_when_the_broker_is_back(told: Told, language: str) -> None:
    assert told.facts(language, "load") == {"push": 0, "simple": 0}, "every answered message was received"
    assert told.went_on[language].keys() == set(LOAD)


def test_the_first_lines_that_the_document_shows_run(
    at_broker: Told, languages: Languages, language: str, tmp_path: Path
) -> None:
    if language in languages.missing:
        pytest.skip(languages.missing[language])
    broker, program = at_broker.broker, languages.programs[language]
    assert broker is not None
    before = asyncio.run(bodies_in(broker.name_server, "Orders"))[0]
    command = command_of(language, program, broker.address, tmp_path)
    packages = {name: value for name, value in program.env.items() if name.endswith("PATH")}
    done = complete(command, tmp_path, packages | {"HOME": str(tmp_path)}, RUN_SECONDS)
    assert done.returncode == 0, f"ended with {done.returncode}: {done.stdout}{done.stderr}"
    assert asyncio.run(bodies_in(broker.name_server, "Orders"))[0] == f"{before}created"
    if language == "python":
        assert done.stdout.splitlines()[-1] == "b'created'"

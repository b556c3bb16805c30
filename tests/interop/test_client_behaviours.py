"""Apache's Java client with our broker and Apache's: the same program, the same facts.

`java/src/interop/ClientBehaviours.java` runs all behaviours in parallel in one JVM and reports facts without ids,
addresses or times. This test compares the facts for the two brokers, behaviour by behaviour.
"""

import subprocess
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from rmqkit import Message
from rmqkit.protocol.codes import ResponseCode
from rmqkit.sync import Producer
from tests.interop.apache import BROKER_NAME, CLUSTER, QUICK_CONF, ApachePair, ask
from tests.interop.conftest import kit_or_skip
from tests.interop.kit import ApacheKit, default_version
from tests.interop.standalone import run_standalone
from tests.interop.static_topics import creation
from tests.patience import producing

BEHAVIOURS = (
    *(
        "send",
        "refusals",
        "batch",
        "auto-batch",
        "static-topic",
        "delay",
        "transactions",
        "request-reply",
        "query",
        "trace",
    ),
    *("push", "pull", "lite-pull", "ordered", "sql", "broadcast", "retry", "rebalance", "offsets"),
)
HEAP_MB = 400
SECONDS_MAX = 600
CONF = {
    "brokerName": BROKER_NAME,
    "brokerClusterName": CLUSTER,
    "enablePropertyFilter": "true",
    **{key: value for key, value in QUICK_CONF.items() if key != "waitTimeMillsInSendQueue"},
}

Facts = dict[str, list[str]]


@pytest.fixture(scope="module")
def told(apache: ApachePair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Facts]]:
    """Return the facts by peer and behaviour. The program runs with both brokers at the same time."""
    kit = kit_or_skip(default_version())
    work_dir = tmp_path_factory.mktemp("behaviours")
    conf = work_dir / "broker.conf"
    conf.write_text("".join(f"{key}={value}\n" for key, value in CONF.items()))
    with run_standalone(work_dir / "store", work_dir, "-c", str(conf)) as ours:
        with Producer("first", ours.namesrv_addr, settings=producing()) as producer:
            # Java treats a record at offset 0 as missing.
            producer.send(Message(topic="First", body=b"first"))
        for address in (apache.broker_addr, ours.broker_addr):
            assert ask(address, creation("Behaviour-static-topic", BROKER_NAME)).code == ResponseCode.SUCCESS
        runs = {
            name: start(kit, namesrv_addr, work_dir, name)
            for name, namesrv_addr in (("apache", apache.namesrv_addr), ("ours", ours.namesrv_addr))
        }
        try:
            yield {name: facts_of(run, work_dir / f"{name}.facts") for name, run in runs.items()}
        finally:
            for run in runs.values():
                run.kill()
        ours.stop()


def start(kit: ApacheKit, namesrv_addr: str, work_dir: Path, name: str) -> subprocess.Popen[str]:
    home = work_dir / name
    home.mkdir()
    command = kit.jvm(
        "interop.ClientBehaviours",
        [namesrv_addr, BROKER_NAME, work_dir / f"{name}.facts", *BEHAVIOURS],
        heap_mb=HEAP_MB,
        work_dir=home,
    )
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def facts_of(run: subprocess.Popen[str], out: Path) -> Facts:
    output, _ = run.communicate(timeout=SECONDS_MAX)
    assert run.returncode == 0, output[-3000:]
    facts: Facts = defaultdict(list)
    for line in out.read_text().splitlines():
        behaviour, _, fact = line.partition("\t")
        facts[behaviour].append(fact)
    return facts


@pytest.mark.parametrize("behaviour", BEHAVIOURS)
def test_a_java_program_sees_of_our_broker_what_it_sees_of_apaches(told: dict[str, Facts], behaviour: str) -> None:
    apache, ours = told["apache"][behaviour], told["ours"][behaviour]

    assert len(apache) > 1, f"the program told nothing of {behaviour}"
    assert apache[-1] == "end", f"against Apache's own broker: {apache[-1]}"
    assert ours == apache

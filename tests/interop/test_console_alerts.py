"""Alert rules of the web console over real servers: a full disk, a stopped slave, a group with growing lag. Each fires
once and resolves once at a webhook, with signed requests.

The master's store is a file system of 64 MiB in a mount namespace of its own, which other processes do not see. The
slave's process is stopped (SIGSTOP) and continued. The watcher checks without pauses, so that the test does not wait.
"""

from __future__ import annotations

import hashlib
import hmac
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rmqkit import Message
from rmqkit.admin import Admin
from rmqkit.admin.cluster.groups import END_MS
from rmqkit.console import Console
from rmqkit.console.alerts.rules import Rule
from rmqkit.console.watch import watcher
from tests.admin.things import send
from tests.console.test_alerts import SECRET, receiving
from tests.interop.replicas import BROKER, CONF, frozen, run_replica
from tests.interop.server_process import ServerProcess
from tests.interop.standalone import READY_SECONDS, RMQ, run_name_server
from tests.ports import free_ports
from tests.waiting import until

pytestmark = pytest.mark.real_time

OWN_DISK = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=64m none "$0" && exec "$@"')
RULES = (
    Rule(name="lag", figure="lag", selector="billing", value=100, samples=2, channel="hook"),
    Rule(name="disk", figure="disk", selector=BROKER, value=0.4, samples=2, channel="hook"),
    Rule(name="slave", figure="slave", selector=f"{BROKER}@*", value=100 << 10, samples=2, channel="hook"),
)


@contextmanager
def small_master(folder: Path, name_servers: str) -> Iterator[ServerProcess]:
    """Run a master whose store is a file system of 64 MiB. Skip the test if mounting is not allowed."""
    store = folder / "store"
    store.mkdir(parents=True)
    tried = subprocess.run([*OWN_DISK, store, "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"no file system can be mounted here: {tried.stderr.strip()}")
    _, port, ha_port = free_ports()
    conf = {
        **CONF,
        "brokerRole": "ASYNC_MASTER",
        "listenPort": port,
        "haListenPort": ha_port,
        "mappedFileSizeCommitLog": 4 << 20,
    }
    (folder / "broker.conf").write_text("".join(f"{key}={value}\n" for key, value in conf.items()))
    where = ("--host", "127.0.0.1", "--store", store, "-n", name_servers, "-c", folder / "broker.conf")
    with ServerProcess([*OWN_DISK, store, RMQ, "broker", *where], folder / "broker.log") as process:
        process.wait_ready(r"^ready broker=", READY_SECONDS)
        yield process


async def test_rules_fire_and_resolve_once_each_over_real_servers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watcher, "ROUND_S", 0.1)
    monkeypatch.setattr(watcher, "PER_SECOND", 1_000)
    monkeypatch.setattr(watcher, "ANSWER_MS", 500)  # a stopped slave is queried too
    with (
        run_name_server(tmp_path) as (_, name_server),
        small_master(tmp_path / "master", name_server) as master,
        run_replica(None, tmp_path / "slave", [name_server], 1) as slave,
    ):
        disk = Path(f"/proc/{master.pid}/root{tmp_path}/master/store")
        async with receiving() as receiver, Admin(name_server) as admin:
            await admin.topics.create("Orders", read_queues=1, write_queues=1)
            await admin.groups.update("billing", {})
            await send(admin, Message(topic="Orders", body=b"x"))
            await admin.offsets.reset("billing", "Orders", 0)
            async with Console(name_server, state=tmp_path / "state") as console:
                (env,) = console.envs.values()
                await env.alerts.put_channel(receiver.channel())
                for rule in RULES:
                    await env.alerts.put_rule(rule)
                env.watcher.look()
                await until(lambda: any(one.ha and one.ha.ha_connection_info for one in env.watcher.snapshot.brokers))

                def told() -> Counter[tuple[str, str]]:
                    return Counter((one["state"], one["rule"]) for one in receiver.events)

                with frozen(slave):
                    await send(admin, *(Message(topic="Orders", body=bytes(2048)) for _ in range(200)))
                    (disk / "filler").write_bytes(bytes(36 << 20))
                    await until(lambda: len(told()) == 3, "three rules that fire")
                    assert told() == {("firing", rule.name): 1 for rule in RULES}
                (disk / "filler").unlink()
                await admin.offsets.reset("billing", "Orders", END_MS)
                await until(lambda: len(told()) == 6, "three rules that resolve")
                rounds = env.watcher.snapshot.at_ms
                await until(lambda: env.watcher.snapshot.at_ms > rounds + 500, "some more rounds")
                assert told() == {(state, rule.name): 1 for rule in RULES for state in ("firing", "resolved")}
                assert env.alerts.alerts == {}
            for _, headers, body in receiver.got:
                signed = hmac.new(SECRET.encode(), body, hashlib.sha256).hexdigest()
                assert headers["x-rmq-signature"] == f"sha256={signed}"
            values = {one["rule"]: (one["target"], one["value"]) for one in receiver.events if one["state"] == "firing"}
            assert values["lag"][0] == "billing"
            assert 100 < values["lag"][1] <= 201
            assert values["slave"][0] == f"{BROKER}@127.0.0.1"
            assert values["disk"][0] == BROKER
            assert 0.4 < values["disk"][1] < 0.9

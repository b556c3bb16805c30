"""A replay of dead letters whose console is killed: ``python -m tests.console.killed [COUNT] [RATE] [KILLS]``.

A broker has dead letters of three kinds. A console in a process of its own groups them, counts them in a dry run and
begins a replay. ``kill -9`` ends the console several times, and the next console continues. At the end each message is
in its target once and has one line in the audit of the job. The program prints its figures as JSON. The exit code is 1
if a message is lost or duplicated.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

from rmqkit.admin import Admin
from rmqkit.admin.replay.selection import Selection
from rmqkit.admin.replay.sources import TopicSource
from rmqkit.client.consumer.pull import PullConsumer
from rmqkit.protocol.names import TOOLS_GROUP
from rmqkit.standalone import Standalone
from tests.admin.test_dead import die

GROUP = "billing"
PATH = f"/local/groups/{GROUP}/dead"


class Process:
    """A console as a process."""

    def __init__(self, name_servers: str, state: Path) -> None:
        environment = {**os.environ, "XDG_STATE_HOME": str(state)}
        command = [sys.executable, "-m", "rmqkit", "console", "-n", name_servers, "--port", "0"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        assert self.process.stdout is not None
        self._base = self.process.stdout.readline().partition("console=")[2].strip().rstrip("/")

    def ask(self, path: str, form: dict[str, str] | None = None) -> Any:
        body = None if form is None else urllib.parse.urlencode(form).encode()
        request = urllib.request.Request(self._base + path, data=body, headers={"accept": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


async def copies(name_servers: str, *topics: str) -> Counter[str]:
    """Return the number of copies of each message in some topics, by key."""
    found: Counter[str] = Counter()
    async with PullConsumer(TOOLS_GROUP, name_servers) as consumer:
        for topic in topics:
            source = TopicSource(consumer, topic, Selection(topic))
            async for picked in source.read(await source.lanes()):
                found[picked.message.keys[0]] += 1
    return found


async def main(count: int, rate: int, kills: int) -> int:
    with tempfile.TemporaryDirectory() as folder:
        state = Path(folder) / "state"
        async with Standalone(Path(folder) / "store") as both, Admin(both.namesrv_address) as admin:
            await admin.groups.update(GROUP, {})
            for topic in ("Orders", "Emails"):
                await admin.topics.create(topic)
            await die(admin, GROUP, count)
            figures = await asyncio.to_thread(_replay, both.namesrv_address, state, rate, kills)
            found = await copies(both.namesrv_address, "Orders", "Emails")
        lines = Counter(
            json.loads(line)["place"] for line in next(state.rglob("replay-*.audit.jsonl")).read_text().splitlines()
        )
    lost, twice = count - len(found), sum(number > 1 for number in found.values())
    print(json.dumps({"deadLetters": count, **figures, "lost": lost, "twice": twice, "auditLines": lines.total()}))
    return int(bool(lost or twice or lines.total() != count or len(lines) != count))


def _replay(name_servers: str, state: Path, rate: int, kills: int) -> dict[str, Any]:
    console = Process(name_servers, state)
    began = time.monotonic()
    kinds = console.ask(PATH)["found"]
    grouped_s, began = time.monotonic() - began, time.monotonic()
    review = console.ask(PATH, {"to": "", "rate": str(rate), "begin": "", "end": ""})
    dry_run_s, began = time.monotonic() - began, time.monotonic()
    job = console.ask(PATH, {"review": review["token"]})["result"]["job"]
    killed = 0
    while (shown := console.ask(f"/local/jobs/{job}")["job"])["status"] == "running":
        if killed < kills and shown["sent"] > shown["expected"] * (killed + 1) / (kills + 1):
            console.kill()
            killed += 1
            console = Process(name_servers, state)
        time.sleep(0.1)
    console.kill()
    return {
        "kinds": {one["kind"]: one["count"] for one in kinds["kinds"]},
        "groupedS": round(grouped_s, 2),
        "dryRunS": round(dry_run_s, 2),
        "requests": review["requests"],
        "kills": killed,
        "replayS": round(time.monotonic() - began, 1),
        "status": shown["status"],
        "sent": shown["sent"],
        "foundAsSent": shown["found"],
    }


if __name__ == "__main__":
    given = [int(text) for text in sys.argv[1:4]]
    sys.exit(asyncio.run(main(*(given + [10_000, 500, 3][len(given) :]))))

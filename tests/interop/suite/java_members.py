"""Group members that are Apache's Java push consumers, in one JVM per peer while a test needs it."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import threading
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass

from tests.interop.suite.consuming import until
from tests.interop.suite.scene import JAVA_HEAP_MB, Peer, Scene

JAVA_STARTS_SECONDS = 200.0
STOP_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Got:
    """A message that a Java member handled."""

    queue_id: int
    queue_offset: int
    reconsume_times: int
    body: str
    seconds: float
    """The time of its handling, on the clock of `time.monotonic`."""


class JavaMembers:
    """The JVM, which exits when its input is closed."""

    def __init__(self, peer: Peer) -> None:
        work_dir = peer.work_dir / "java-members"
        work_dir.mkdir(exist_ok=True)
        command = peer.kit().jvm("interop.GroupMembers", [peer.namesrv_addr], heap_mb=JAVA_HEAP_MB, work_dir=work_dir)
        self.users = 0
        self._got: defaultdict[str, list[Got]] = defaultdict(list)
        self._told: list[str] = []
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self._reading = threading.Thread(target=self._read, name="what Java members tell")
        self._reading.start()

    async def join(
        self, scene: Scene, mode: str = "concurrent", strategy: str = "AVG", name: str = "java"
    ) -> list[Got]:
        """Add a member to the scene's group. Return the growing list of its messages."""
        name = f"{scene.name}-{name}"
        self._say(f"join {name} {scene.group} {scene.topic} {mode} {strategy}")
        await until(lambda: f"joined {name}" in self._told, f"{name} to join", JAVA_STARTS_SECONDS)
        return self._got[name]

    async def leave(self, scene: Scene, name: str = "java") -> None:
        """Remove a member from the group, and wait until it has left."""
        name = f"{scene.name}-{name}"
        self._say(f"leave {name}")
        await until(lambda: f"left {name}" in self._told, f"{name} to leave")

    def close(self) -> None:
        """Close the input, and wait until the JVM has exited."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reading.join()
        self._process.stdout.close()

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            kind, name, *rest = line.rstrip("\n").split(" ", 2)
            if kind == "got":
                queue_id, queue_offset, reconsume_times, nanoseconds, body = rest[0].split(" ", 4)
                self._got[name].append(
                    Got(int(queue_id), int(queue_offset), int(reconsume_times), body, int(nanoseconds) / 1e9)
                )
            else:
                self._told.append(f"{kind} {name}")


_running: dict[str, JavaMembers] = {}
_changing: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)


@contextlib.asynccontextmanager
async def java_members(scene: Scene) -> AsyncIterator[JavaMembers]:
    """Return the peer's JVM. Skip the test without Java."""
    name = scene.peer.name
    async with _changing[name]:
        if name not in _running:
            await scene.peer.java_permits.acquire()
            try:
                _running[name] = await asyncio.to_thread(JavaMembers, scene.peer)
            except BaseException:
                scene.peer.java_permits.release()
                raise
        members = _running[name]
        members.users += 1
    try:
        yield members
    finally:
        async with _changing[name]:
            members.users -= 1
            if not members.users:
                del _running[name]
                await asyncio.to_thread(members.close)
                scene.peer.java_permits.release()

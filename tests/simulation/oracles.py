"""The oracles: facts that must be true in every run, under all faults.

=====================================  ================================================================================
oracle                                 looked at
=====================================  ================================================================================
nothing strange, changed or rolled     at each call of a handler (`Ledger.arrived`)
  back is delivered
a dedupe handles nothing twice         at the end, if no member was killed or paused
nothing is delivered early             at the end, for each arrival of a delayed message, if no clock was moved
order in a queue                       at the end, for ordered, pull and lite groups: no message is skipped
one member handles a queue in order    at the end, for ordered groups, if no broker lost its locks
offsets never pass what was not        twice a second, in the tables of the brokers
  handled
tasks, connections and files bounded   twice a second
everything acknowledged is delivered   after the healing, within a bound
everything acknowledged is stored      on the disks, after a clean stop, at its place, byte for byte: in the log, or,
                                         if it is older than the log, in a whole segment of the archive
a half message ends once               the same; after a fault, a broker or a producer may have repeated it
nothing young is deleted, and queues   twice a second, and on the disks, if an hour passed on the clock of a broker
  begin with a message
a deleted topic or group leaves        at each call of a handler, after each deletion, and in the queues at the end
  nothing to its next life
a batch of the exactly-once sink is    the same, in all logs: each row once and in order; if its query has given up, all
  stored once                            rows or none
masters and slaves are one history     the same: the slave's log is the beginning of the master's
a slave has nothing that its master    twice a second, with SYNC_FLUSH
  can lose
the store is sound                     the same, with the checks of ``rmq store verify``
=====================================  ================================================================================
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rmqkit.errors import StoreError
from rmqkit.protocol.message import ReceivedMessage, read_messages
from rmqkit.protocol.record import BLANK_BYTES
from rmqkit.store.archive.archive import segments_in
from rmqkit.store.archive.places import Folder
from rmqkit.store.archive.segment import SegmentFile, blocks_of
from rmqkit.store.offline import check as fsck
from rmqkit.testing.simulation import BrokerServer, Cluster
from tests.simulation import sinking
from tests.simulation.clients import CHATS, TOPICS, TOPICS_OF
from tests.simulation.ledger import Arrival, Kind, Place, State, number_of, place_of

if TYPE_CHECKING:
    from tests.simulation.run import Run

_LOOK_SECONDS = 0.5
_IDLE_SECONDS = 10.0
_TASKS_MAX = 600
_CONNECTIONS_MAX = 300
_FILES_MAX = 20
"""Descriptors besides the first one of each file: a broker keeps the files of its log, index and queues open."""
_SHOWN = 3
INCOMPLETE = ("broadcast", "fleeting")
"""Groups that need not get everything: members miss messages while they are dead, or a deletion removes messages."""
_ENDS_OF_LOCKS = ("kill", "kill at call", "power", "power at call", "restart", "failing", "full")


def has_caught_up(cluster: Cluster, slave: BrokerServer) -> bool:
    """Return True if a slave's log ends where its master's log ends."""
    master = master_of(cluster, slave)
    if master.broker is None or slave.broker is None:
        return False
    ours, theirs = slave.broker.context.store, master.broker.context.store
    return ours.max_physical_offset == theirs.max_physical_offset


def master_of(cluster: Cluster, slave: BrokerServer) -> BrokerServer:
    """Return the master that a slave follows."""
    return next(one for one in cluster.masters if one.settings["brokerName"] == slave.settings["brokerName"])


def reports_divergence(run: Run, slave: BrokerServer) -> bool:
    """Return True if a slave refuses to follow a master that lost power, because it has more than the master: an
    operator has to decide then."""
    name = slave.settings["brokerName"]
    lost_power = any(fault.kind.startswith("power") and fault.target == name for fault in run.plan.faults)
    if not lost_power or slave.broker is None or slave.broker.parts.slave is None:
        return False
    return slave.broker.parts.slave.log.is_diverged


class Watch:
    """The oracles that look while the cluster runs."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.findings: list[str] = []
        self._is_on = False
        self._committed: dict[tuple[str, str, str, int], int] = {}

    def begin(self) -> None:
        self._is_on = True
        self._look()

    def end(self) -> None:
        self._is_on = False
        # The next looks call the stores, which must not be in the middle of another call.
        self._run.world.run(until=self._run.world.now + _IDLE_SECONDS, unless=self._is_idle)
        for server in self._run.cluster.masters:
            self._run.expiry.look(server)
            self._run.expiry.look_at_ends(server)
        self._run.lives.look()
        self._look_at_times()
        self._look_at_order()
        self._look_at_locks()
        self._look_at_repeats()

    def _is_idle(self) -> bool:
        running = [one.process for one in self._run.cluster.masters if one.process is not None and one.is_running]
        return all(process.loop.is_idle for process in running)

    def _look(self) -> None:
        if not self._is_on:
            return
        for server in self._run.cluster.masters:
            if server.is_running and server.broker is not None:
                self._run.expiry.look(server)
                self._look_at_offsets(server)
        for slave in self._run.cluster.slaves:
            self._look_at_slave(slave)
        self._look_at_bounds()
        self._run.world.after(_LOOK_SECONDS, self._look)

    def _look_at_offsets(self, server: BrokerServer) -> None:
        """Check the messages that became committed since the last look."""
        assert server.broker is not None
        table, name = server.broker.context.offsets, str(server.settings["brokerName"])
        for group, kind in self._run.plan.groups.items():
            for topic in sorted(TOPICS_OF[kind]) if kind in ("push", "ordered", "pull") else ():
                for queue_id, committed in table.queues(group, topic).items():
                    before = self._committed.get((group, name, topic, queue_id), 0)
                    self._committed[group, name, topic, queue_id] = committed
                    for offset in range(before, committed):
                        number = self._run.ledger.by_place.get(Place(topic, name, queue_id, offset))
                        if number is None or number in self._run.ledger.deleted:
                            continue
                        if not self._was_handled(group, number, or_failed=kind != "pull"):
                            said = f"{group} committed {committed} of {topic}-{queue_id}, and {number} at {offset}"
                            self._find(f"{said} was not handled")

    def _look_at_slave(self, slave: BrokerServer) -> None:
        """Find a slave with a part of the log that its master would lose with its power."""
        master = master_of(self._run.cluster, slave)
        if master.broker is None or slave.broker is None or master.settings["flushDiskType"] != "SYNC_FLUSH":
            return
        has, is_safe = slave.broker.context.store.max_physical_offset, master.broker.context.store.durable_offset
        if has > is_safe:
            self._find(f"{slave.name} has the log up to {has}, and {master.name} has flushed it up to {is_safe}")

    def _was_handled(self, group: str, number: int, *, or_failed: bool) -> bool:
        """Return True if a call for a message has ended. ``or_failed``: a failed call counts, because the broker has
        the message again."""
        arrivals = self._run.ledger.by_number[group].get(number, ())
        return any(one.ended is not None and (or_failed or not one.failed) for one in arrivals)

    def _look_at_bounds(self) -> None:
        world = self._run.world
        for process in world.processes:
            if process.is_alive and process.loop.running_tasks > _TASKS_MAX:
                self._find(f"{process.name} has {process.loop.running_tasks} tasks")
        if world.network.connections > _CONNECTIONS_MAX:
            self._find(f"{world.network.connections} connections are open")
        if (more := world.files.open_files - len(world.files.open_paths)) > _FILES_MAX:
            self._find(f"{more} descriptors are open besides the first one of each file")

    def _look_at_times(self) -> None:
        plan, ledger = self._run.plan, self._run.ledger
        if plan.drifts or any(fault.kind == "clock" for fault in plan.faults):
            return
        for group, arrivals in ledger.arrivals.items():
            for arrival in arrivals:
                one = ledger.sent.get(arrival.number)
                if one is not None and one.due and arrival.at < one.due - 1e-3:
                    self._find(f"{group} got {one.number} {one.due - arrival.at:.3f} s early")

    def _look_at_order(self) -> None:
        """Find messages that an ordered or pull group got before it handled an earlier one of their queue."""
        ledger = self._run.ledger
        for group, kind in self._run.plan.groups.items():
            if kind not in ("ordered", "pull", "lite"):
                continue
            offsets: defaultdict[tuple[str, str, int], set[int]] = defaultdict(set)
            for one in ledger.sent.values():
                if one.place is not None and one.topic in TOPICS_OF[kind] and one.number not in ledger.deleted:
                    offsets[one.place[:3]].add(one.place.offset)
            handled: defaultdict[tuple[str, str, int], set[int]] = defaultdict(set)
            for arrival in ledger.arrivals[group]:
                queue = arrival.place[:3]
                skipped = {at for at in offsets[queue] if at < arrival.place.offset} - handled[queue]
                if skipped and not arrival.is_retried:
                    self._find(f"{group} got {arrival.place} before {min(skipped)}")
                    return
                if kind != "pull" or (arrival.ended is not None and not arrival.failed):
                    handled[queue].add(arrival.place.offset)

    def _look_at_locks(self) -> None:
        """Find two members of an ordered group that handled messages of one queue at the same time. A broker has its
        locks in memory only, so a broker that died or stopped may give a lock to another member."""
        run = self._run
        if any(fault.kind in _ENDS_OF_LOCKS and fault.target in run.plan.servers for fault in run.plan.faults):
            return
        for group in (name for name, kind in run.plan.groups.items() if kind == "ordered"):
            queues: defaultdict[tuple[str, int], list[Arrival]] = defaultdict(list)
            for arrival in run.ledger.arrivals[group]:
                if arrival.ended is not None and not arrival.is_retried:
                    queues[arrival.place.broker, arrival.place.queue_id].append(arrival)
            for queue, arrivals in queues.items():
                self._look_at_members(group, queue, sorted(arrivals, key=lambda one: one.at))

    def _look_at_members(self, group: str, queue: tuple[str, int], arrivals: list[Arrival]) -> None:
        last: Arrival | None = None
        for one in arrivals:
            if last is not None and last.ended is not None and one.at < last.ended and one.member != last.member:
                said = f"{one.member} and {last.member} of {group} handled queue {queue[1]} of {queue[0]} at once"
                self._find(f"{said}: {one.number} at {one.at:.3f} s, and {last.number} until {last.ended:.3f} s")
                return
            if last is None or last.ended is None or (one.ended or 0.0) > last.ended:
                last = one

    def _look_at_repeats(self) -> None:
        """Find messages that a group with a dedupe handled twice, though no member died or stood still."""
        plan, ledger = self._run.plan, self._run.ledger
        if any(fault.kind in ("client killed", "pause") for fault in plan.faults):
            return
        for group, kind in plan.groups.items():
            for number, arrivals in ledger.by_number[group].items() if kind == "once" else ():
                handled = [one for one in arrivals if one.ended is not None and not one.failed]
                if len(handled) > 1:
                    self._find(f"{group} handled {number} {len(handled)} times")

    def _find(self, finding: str) -> None:
        if len(self.findings) < 10:
            self._run.world.note("FINDING", finding)
            self.findings.append(finding)

    def unserved(self) -> list[str]:
        """Return what was not served within the bound after the healing."""
        run = self._run
        down = [server for server in run.cluster.brokers if server.broker is None]
        found = [f"{server.name} does not run after the healing: {server.failures[-1:]}" for server in down]
        for group, kind in run.plan.groups.items():
            missing = [] if kind in INCOMPLETE else run.ledger.missing(group, TOPICS_OF[kind])
            if missing:
                first = missing[0]
                said = f"{group} did not get {len(missing)} messages, the first is {first.number}"
                found.append(f"{said} ({first.kind.value}, {first.place or first.topic})")
        found += [] if run.query.batch is None else [f"batch {run.query.batch.prefix[:-1]} is not committed"]
        for slave in run.cluster.slaves:
            is_settled = has_caught_up(run.cluster, slave) or reports_divergence(run, slave)
            found += [] if is_settled else [f"{slave.name} has not caught up"]
        return found


# ---------------------------------------------------------------- disks


def judge_disks(run: Run, folder: Path) -> list[str]:
    """Return the findings on the disks of stopped brokers. ``folder``: copies of the disks, by name."""
    findings: list[str] = []
    logs: dict[str, dict[str, bytes]] = {}
    for server in run.cluster.brokers:
        root = folder / server.name / "store"
        report = fsck.verify(root, server.loaded()[1])
        problems = [*report.findings]
        if problems or report.is_unclean:
            findings.append(f"{server.name}: verify finds {'; '.join(map(str, problems[:_SHOWN])) or 'an abort file'}")
        logs[server.name] = {path.name: path.read_bytes() for path in sorted((root / "commitlog").iterdir())}
    for master in run.cluster.masters:
        old = archived(folder / master.name, str(master.settings["brokerName"]))
        findings += _judge_log(run, master, logs[master.name], old)
    stored = (
        (str(one.settings["brokerName"]), message)
        for one in run.cluster.masters
        for message in messages_of(logs[one.name])
    )
    findings += sinking.judge(run.query, stored)[:_SHOWN] if run.plan.sink else []
    for slave in (one for one in run.cluster.slaves if one.name not in run.diverged):
        name = str(slave.settings["brokerName"])
        findings += _compare(name, logs[name], slave.name, logs[slave.name])
    return findings


def archived(folder: Path, name: str) -> dict[int, bytes]:
    """Return the content of the whole segments of a broker's archive, by the start of their log file."""
    place = Folder(folder / "archive" / name)
    found: dict[int, bytes] = {}
    for segment_name, size in sorted(segments_in(place).items()):
        try:
            segment = SegmentFile(segment_name, partial(place.read, segment_name), size)
            segment.check_footer()
            found[segment.directory.start] = b"".join(content for *_, content in blocks_of(segment))
        except StoreError:
            continue
    return found


def _judge_log(run: Run, master: BrokerServer, log: dict[str, bytes], old: dict[int, bytes]) -> list[str]:
    """Compare the log of a master with what its clients know. ``old``: the segments of its archive, of which those are
    looked at whose log file is deleted."""
    ledger, findings, name = run.ledger, [], str(master.settings["brokerName"])
    stored: dict[Place, int] = {}
    copies: Counter[int] = Counter()
    begin = int(min(log, default="0"))
    segments = {f"{start:020d}": content for start, content in old.items() if start < begin}
    for record in messages_of(segments | log):
        if record.topic not in TOPICS and record.topic != CHATS:
            continue
        number = number_of(record.body)
        place = place_of(record, name)
        if place in stored:
            findings.append(f"{place} is stored twice")
        stored[place] = number
        copies[number] += 1
        one = ledger.sent.get(number)
        if one is None or one.body != bytes(record.body):
            findings.append(f"{place} holds what nobody sent")
    run.expiry.judge(name, stored)
    for one in ledger.sent.values():
        is_kept = one.place is not None and one.place.broker == name and one.number not in ledger.deleted
        if is_kept and one.place is not None and stored.get(one.place) != one.number:
            findings.append(f"{one.number} was acknowledged at {one.place} and is not there")
        if one.kind is Kind.ROLLED_BACK and copies[one.number]:
            findings.append(f"{one.number} was rolled back and is stored")
        if one.kind is Kind.COMMITTED and copies[one.number] > 1 and not run.befallen and not master.failures:
            findings.append(f"{one.number} was committed {copies[one.number]} times")
        is_committed = one.kind is Kind.COMMITTED and one.state is State.ACKNOWLEDGED
        if is_committed and run.plan.brokers == 1 and not copies[one.number]:
            findings.append(f"{one.number} was committed and is not stored")
    return findings[:_SHOWN]


def messages_of(log: dict[str, bytes]) -> Iterator[ReceivedMessage]:
    """Return the messages of a log, by its files."""
    for name in sorted(log):
        content, position = log[name], 0
        while position + BLANK_BYTES <= len(content):
            size = int.from_bytes(content[position : position + 4], "big")
            magic = content[position + 4 : position + 8]
            if size == 0 or magic == b"\xcb\xd4\x31\x94" or size > len(content) - position:
                break
            yield from read_messages(content[position : position + size])
            position += size


def _compare(master: str, ours: dict[str, bytes], slave: str, theirs: dict[str, bytes]) -> list[str]:
    """Compare the log of a slave with the log of its master."""
    for name in sorted(theirs):
        copy, original = theirs[name], ours.get(name)
        if original is None:
            if any(copy):
                return [f"{slave} has the log file {name}, and {master} has not"]
        elif copy != original:
            end = next(i for i, (one, other) in enumerate(zip(copy, original, strict=False)) if one != other)
            if any(copy[end:]):
                return [f"the log of {slave} differs from that of {master} in {name} at {end}"]
    return []

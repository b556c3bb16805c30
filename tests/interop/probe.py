"""The Java probe (`java/src/interop/JavaClientProbe.java`): runs it and reads its output."""

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tests.interop.kit import ApacheKit

PROBE_HEAP_MB = 300
LAST_TAG = "last"  # the tag of the last message of a queue, part of every tag expression


class Message(msgspec.Struct, rename="camel", kw_only=True):
    """One message as its user and its broker see it: equal on both sides."""

    topic: str
    flag: int
    body_bytes: int
    body_sha256: str
    user_properties: dict[str, str]
    msg_id: str
    offset_msg_id: str
    queue_id: int
    queue_offset: int
    tags: str | None = None
    keys: str | None = None


class Sent(Message, tag="sent", tag_field="event", rename="camel", kw_only=True):
    kind: str
    status: str
    result_msg_id: str


class Received(Message, tag="received", tag_field="event", rename="camel", kw_only=True):
    group: str
    physical_offset: int
    store_size_bytes: int
    born_host: str
    store_host: str
    born_timestamp_ms: int
    store_timestamp_ms: int
    reconsume_times: int


class Queue(msgspec.Struct, tag="queue", tag_field="event", rename="camel", kw_only=True):
    topic: str
    queue_id: int
    min_offset: int
    max_offset: int


class Summary(msgspec.Struct, tag="summary", tag_field="event", rename="camel", kw_only=True):
    complete: bool
    text: str


_event_decoder = msgspec.json.Decoder(Sent | Received | Queue | Summary)


@dataclass(frozen=True, slots=True)
class ProbeRun:
    """The report of one run of the probe."""

    exit_code: int
    output: str
    sent: list[Sent]
    received: list[Received]
    queues: list[Queue]
    summaries: list[Summary]

    @property
    def outcome(self) -> str:
        """Return a text for the message of a failed assertion."""
        text = "; ".join(summary.text for summary in self.summaries) or "no summary"
        return f"exit {self.exit_code}: {text}\n{self.output[-2000:]}"

    def received_by(self, group: str) -> list[Received]:
        return [message for message in self.received if message.group == group]


def run_probe(
    kit: ApacheKit,
    command: str,
    *,
    namesrv: str,
    topic: str,
    work_dir: Path,
    count: int | None = None,
    consumers: Mapping[str, str] | None = None,
    timeout_seconds: int = 200,
    jvm_options: Sequence[str] = (),
) -> ProbeRun:
    """Run one command of the probe to its end.

    Args:
        command: `send`, `consume`, `both` or `read`.
        count: messages to send, for `send` and `both`; one more per queue follows, tagged LAST_TAG.
        consumers: group to tag expression; for `consume` the expression ends in `:` and the expected number.
        timeout_seconds: the time after which the probe reports missing messages.

    Raises subprocess.TimeoutExpired when the Java program itself hangs.
    """
    out = work_dir / f"{command}-{topic}.jsonl"
    arguments: list[object] = [command, "--namesrv", namesrv, "--topic", topic, "--out", out]
    arguments += ["--timeout-seconds", timeout_seconds]
    if count is not None:
        arguments += ["--count", count]
    for group, expression in (consumers or {}).items():
        arguments += ["--consumer", f"{group}:{expression}"]
    java, *rest = kit.jvm("interop.JavaClientProbe", arguments, heap_mb=PROBE_HEAP_MB, work_dir=work_dir)
    done = subprocess.run(
        [java, *jvm_options, *rest],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=timeout_seconds + 200,
    )
    events = _event_decoder.decode_lines(out.read_bytes()) if out.exists() else []
    return ProbeRun(
        exit_code=done.returncode,
        output=done.stdout,
        sent=[event for event in events if isinstance(event, Sent)],
        received=[event for event in events if isinstance(event, Received)],
        queues=[event for event in events if isinstance(event, Queue)],
        summaries=[event for event in events if isinstance(event, Summary)],
    )

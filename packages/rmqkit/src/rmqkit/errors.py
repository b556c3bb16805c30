"""The exception classes, and the exit codes of the command line. Most classes make their text from their arguments.

::

    RmqError
    ├── ProtocolError            a peer or a file violates a format
    │   ├── FrameError             the byte stream is not a sequence of frames: close the connection
    │   ├── HeaderError            a command header or one of its fields cannot be read
    │   ├── BodyError              a JSON, batch or compressed body cannot be read
    │   │   └── BodyMismatch         a message's body is not of the requested type
    │   └── RecordCorrupt          bytes are not a stored record
    ├── SettingsError            a configuration value cannot be used
    │   └── ExtraMissing           a package of an extra is not installed
    ├── StoreError               the store cannot execute an operation
    │   ├── StoreLocked            another process owns the directory
    │   ├── StoreMismatch          files do not have the size or format that the settings require
    │   ├── LogDiverged            a slave's log is not the beginning of its master's
    │   └── StoreUnavailable       the log refuses writes (failed flush, shut down, disk full)
    ├── RemotingError            a call over a socket got no response
    │   ├── ConnectFailed
    │   ├── ConnectionLost
    │   ├── RequestTimedOut
    │   ├── WrongProtocol          the peer does not speak RocketMQ's protocol
    │   └── TlsMismatch            only one side encrypts, or a certificate is not trusted
    ├── PeerRefused              the peer's response has an error code
    ├── UnknownName              a topic, group, broker, cluster or message does not exist
    └── ClientError              the client cannot execute an operation
        ├── NoRoute                no broker is known for a topic
        │   └── NoNameServer         no name server answered
        ├── MessageIllegal         a message violates a rule and is not sent
        ├── ReadOnly               a request would change something on a read-only connection
        ├── SendFailed             every attempt of a send failed
        ├── ReplyTimedOut          a request message was stored, but no reply arrived in time
        ├── NotARequest            a message has no reply address
        ├── EventIdIllegal         an event id does not belong to the stream, or the stream has no such event yet
        └── StreamExpired          the events after an event id were deleted

A programmer's mistake fails an ``assert`` instead. After an error the command line exits with its `exit_code`:

====  ===========================================================
code  kind
====  ===========================================================
0     done
1     failed for another reason
2     the command line or a setting is not valid
3     no server was reached, or another program listens there
4     refused, because of a permission, a signature or a limit
5     there is no topic, group, broker, cluster or message of that name
6     no response in time
7     TLS: only one side encrypts, or a certificate is not trusted
8     done, and something is wrong with the cluster (rmq cluster findings)
130   stopped by Ctrl-C or SIGTERM before the end, as in shells
====  ===========================================================
"""

from __future__ import annotations

import enum
import shlex
from collections.abc import Iterable, Sequence

from rmqkit.sentences import _, joined

__all__ = [
    "BodyError",
    "BodyMismatch",
    "ClientError",
    "ConnectFailed",
    "ConnectionLost",
    "EventIdIllegal",
    "ExitCode",
    "ExtraMissing",
    "FrameError",
    "HeaderError",
    "LogDiverged",
    "MessageIllegal",
    "NoNameServer",
    "NoRoute",
    "NotARequest",
    "PeerRefused",
    "ProtocolError",
    "ReadOnly",
    "RecordCorrupt",
    "RemotingError",
    "ReplyTimedOut",
    "RequestTimedOut",
    "RmqError",
    "SendFailed",
    "SettingsError",
    "StoreError",
    "StoreLocked",
    "StoreMismatch",
    "StoreUnavailable",
    "StreamExpired",
    "TimeIllegal",
    "TlsMismatch",
    "UnknownName",
    "WrongProtocol",
    "exit_code",
]


class RmqError(Exception):
    """Base class of all exceptions of rmqkit."""


class ProtocolError(RmqError):
    """Bytes from a peer or a file do not have the right format."""


class FrameError(ProtocolError):
    """The byte stream of a connection is not a sequence of frames. The connection must be closed."""


class HeaderError(ProtocolError):
    """A command header or one of its fields cannot be read."""


class BodyError(ProtocolError):
    """The body of a command or of a message cannot be read."""


class BodyMismatch(BodyError):
    """The body of a message is not a value of the requested type.

    Args:
        type_name: the name of the type.
        reason: the mismatch, without the values found.
    """

    def __init__(self, type_name: str, reason: str) -> None:
        super().__init__(f"the body is not of type {type_name}: {reason}")
        self.type_name = type_name
        self.reason = reason


class RecordCorrupt(ProtocolError):
    """Bytes at a position are not a whole stored record.

    Args:
        position: the expected position of the record, in bytes from the start of the buffer.
        reason: the failed check.
        size: the size of the record in bytes according to its header, or 0 if the header was not read.
    """

    def __init__(self, position: int, reason: str, *, size: int = 0) -> None:
        super().__init__(f"no valid record at byte {position}: {reason}")
        self.position = position
        self.reason = reason
        self.size = size


class SettingsError(RmqError):
    """A settings file, a key or a value is not valid."""


class ExtraMissing(SettingsError):
    """A package that a feature needs is not installed.

    Args:
        what: the feature that needs the package.
        package: the package.
        remedy: the command that installs the package.
    """

    def __init__(self, what: str, package: str, remedy: str) -> None:
        super().__init__(f"{what} needs {package}, which is not installed: {remedy}")
        self.package = package
        self.remedy = remedy


class StoreError(RmqError):
    """The store cannot execute an operation."""


class StoreLocked(StoreError):
    """Another process is using the store directory."""

    def __init__(self, path: str) -> None:
        super().__init__(f"store {path} is in use by another process: stop that broker or choose another directory")
        self.path = path


class StoreMismatch(StoreError):
    """A file of the store does not have the size or format that the settings require."""


class StoreDamaged(StoreError):
    """The log has damaged bytes, followed by valid records. A start would remove these records.

    Args:
        root: directory of the store.
        physical_offset: position of the damaged bytes.
        found: the kind of damage, and the bytes after it.
    """

    def __init__(self, root: str, physical_offset: int, found: str) -> None:
        super().__init__(
            f"store {root} is damaged: there is no record at {physical_offset} of its commit log ({found}); a start "
            f"would cut that off; to keep it, run: rmq store repair {shlex.quote(root)}"
        )
        self.physical_offset = physical_offset


class LogDiverged(StoreError):
    """The logs of a slave and of its master have different histories, so replication must stop.

    Args:
        physical_offset: position from which the logs differ.
        found: the data at this position.
        remedy: the remedy for the operator, or empty for the usual remedy.
    """

    def __init__(self, physical_offset: int, found: str, remedy: str = "") -> None:
        remedy = remedy or "if the messages of the master are right, move this store away, so that it is copied again"
        super().__init__(f"the log is not its master's from physical offset {physical_offset} on: {found}; {remedy}")
        self.physical_offset = physical_offset
        self.found = found


class StoreUnavailable(StoreError):
    """The store refuses writes until an operator fixes the cause."""


class RemotingError(RmqError):
    """A request got no response."""


class ConnectFailed(RemotingError):
    """The connection to an address failed."""

    def __init__(self, address: str, reason: str, remedy: str = "check whether it runs and can be reached") -> None:
        super().__init__(f"cannot connect to {address}: {reason}; {remedy}")
        self.address = address
        self.reason = reason


class ConnectionLost(RemotingError):
    """The connection was closed before the response arrived."""

    def __init__(self, address: str, reason: str) -> None:
        super().__init__(
            f"connection to {address} closed before the answer: {reason}; it may have executed the request"
        )
        self.address = address
        self.reason = reason


class RequestTimedOut(RemotingError):
    """No response arrived in time.

    Args:
        code: the request code.
        request: name and number of the request, for the text of the error.
    """

    def __init__(self, address: str, code: int, timeout_ms: float, request: str = "") -> None:
        super().__init__(
            f"{address} did not answer {request or f'request {code}'} within {timeout_ms:.0f} ms; it may have executed "
            "the request: check whether it is overloaded, or allow more time"
        )
        self.address = address
        self.code = code
        self.timeout_ms = timeout_ms


class WrongProtocol(RemotingError):
    """The peer does not speak the remoting protocol."""

    def __init__(self, address: str, found: str) -> None:
        super().__init__(
            f"{address} does not speak RocketMQ's protocol: {found}; check the port: name servers use 9876, brokers "
            "10911, and a gRPC proxy (8081) has another protocol"
        )
        self.address = address


class TlsMismatch(RemotingError):
    """Only one side uses TLS, or a certificate is not trusted."""

    def __init__(self, address: str, found: str, remedy: str) -> None:
        super().__init__(f"{address}: {found}; {remedy}")
        self.address = address


_NO_PERMISSION = 16
REMEDIES = {
    2: "it is overloaded: send less, or try again later",
    3: "it is an older version, has this switched off, or is the other kind of server (broker, name server)",
    13: "change the topic, the size or the properties of the message",
    14: "try again later: it may be shutting down, be a slave, or have too little disk space",
    _NO_PERMISSION: "grant the permission: on the topic, the group or the broker, or to the user",
    17: "create the topic",
    23: "correct the subscription's expression",
    24: "the consumer may have just started, or have other topics than the rest of its group",
    25: "members of the group subscribe differently: give all of them the same subscriptions",
    26: "create the group, or set autoCreateSubscriptionGroup=true on the broker",
    206: "start one of its consumers, or correct the name: rmq group list",
    215: "it limits its clients: send fewer requests, or try again later",
}
"""Remedies by response code (remoting.md §5)."""
REMARKS = {
    13: {
        "the delay time should not be bigger than": "deliver it sooner, or raise timerMaxDelaySec on the broker",
        "msg body length limit": "make the body or the properties smaller, or raise maxMessageSize on the broker",
        "Required message key is missing": "give the message a key: its topic requires one",
    },
    _NO_PERMISSION: {
        "Can not update config in black list.": "change it in the settings file of the server, and restart it",
        "username cannot be null.": "sign the requests: give an access key and its secret",
        "check signature failed.": "the secret is not the one of that access key",
        " may not change this server: ": "",
        "recall failed, operation is forbidden": "set recallMessageEnable=true on the broker (possible at run time)",
        " is not found.": "correct the access key, or create this user there",
    },
}
"""More specific remedies, by response code and a part of the remark. The text is empty if the remark has the remedy."""


class PeerRefused(RmqError):
    """The response of a peer has an error code.

    Args:
        code: the response code.
        remark: the text of the peer, which may be empty.
        address: the address of the peer.
    """

    def __init__(self, code: int, remark: str | None, address: str) -> None:
        special = (text for part, text in REMARKS.get(code, {}).items() if part in (remark or ""))
        wanted = next(special, REMEDIES.get(code))
        remedy = f"; {wanted}" if wanted else ""
        one_line = " ".join((remark or "no remark").partition("\nSee http")[0].split())  # one line, without the link
        super().__init__(f"{address} answered with code {code}: {one_line}{remedy}")
        self.code = code
        self.remark = remark or ""
        self.address = address


class UnknownName(RmqError):
    """There is no object with this name.

    Args:
        kind: the kind of object: topic, group, broker, cluster, message.
        asked: the server that does not know the name, such as ``name server 127.0.0.1:9876``.
        known: the existing names. The error suggests the most similar name.
        remedy: a further sentence with a remedy.
    """

    def __init__(self, kind: str, name: str, asked: str, known: Iterable[str] | None = None, remedy: str = "") -> None:
        text = _hint(_("{asked} has no {kind} {name}", asked=asked, kind=_(kind), name=name), name, known)
        super().__init__(joined("; ", [text, remedy]) if remedy else text)
        self.kind = kind
        self.name = name
        self.asked = asked


def _hint(text: str, name: str, known: Iterable[str] | None) -> str:
    """Return a text with a suggestion: the most similar name, or some of the existing names."""
    from difflib import get_close_matches

    if known is None:
        return text
    names = sorted(known)
    near = get_close_matches(name, names, n=1)
    if near:
        return _("{text}: did you mean {near}?", text=text, near=near[0])
    few = ", ".join(names[:_NAMES_SHOWN]) or _("none")
    if (more := len(names) - _NAMES_SHOWN) > 0:
        return _("{text}: it has {few} and {more} more", text=text, few=few, more=more)
    return _("{text}: it has {few}", text=text, few=few)


_NAMES_SHOWN = 5


class ClientError(RmqError):
    """The client cannot execute an operation."""


class NoRoute(ClientError):
    """No broker is known for a topic, or no name server answers."""


class NoNameServer(NoRoute):
    """No name server responded.

    Args:
        causes: the error of each name server.
    """

    def __init__(self, causes: Sequence[RmqError]) -> None:
        super().__init__(f"no name server answered, check the addresses: {'; '.join(map(str, causes))}")
        self.causes = causes


class TimeIllegal(ClientError, ValueError):
    """A value is not a duration, or not a point in time."""


class MessageIllegal(ClientError):
    """A message was not sent, because it violates a rule."""


class ReadOnly(ClientError):
    """A request was not sent, because it would change something and the connection is read-only.

    Args:
        code: the request code.
        name: the name of the request in RocketMQ.
        address: the address of the peer.
    """

    def __init__(self, code: int, name: str, address: str) -> None:
        super().__init__(
            f"request {name} ({code}) to {address} was not sent: it would change something, and this is read-only"
        )
        self.code = code
        self.name = name
        self.address = address


class SendFailed(ClientError):
    """Every attempt of a send failed.

    Args:
        topic: the topic of the message.
        brokers: the names of the brokers, in the order of the attempts.
        cause: the most frequent error, or the first of equally frequent errors.
        others: one error of each other kind.
    """

    def __init__(self, topic: str, brokers: list[str], cause: Exception, others: Sequence[Exception] = ()) -> None:
        tries = "1 try" if len(brokers) == 1 else f"{len(brokers)} tries"
        outcome = f"not stored after {tries} on {', '.join(dict.fromkeys(brokers))}" if brokers else "not sent"
        also = f" (other tries: {'; '.join(map(str, others))})" if others else ""
        super().__init__(f"message for topic {topic} {outcome}: {cause}{also}")
        self.topic = topic
        self.brokers = brokers
        self.cause = cause
        self.others = others


class ReplyTimedOut(ClientError):
    """A request message was stored, but no reply arrived in time (Java's ``RequestTimeoutException``).
    ``code`` is Java's number for this error."""

    code = 10006

    def __init__(self, topic: str, timeout_ms: float) -> None:
        super().__init__(
            f"the request for topic {topic} was stored, and no reply came within {timeout_ms:.0f} ms: "
            "does a consumer of the topic reply?"
        )
        self.topic = topic
        self.timeout_ms = timeout_ms


class NotARequest(ClientError):
    """A message has no reply address, because it was not sent with `Producer.request`.
    ``code`` is Java's number for this error."""

    code = 10007

    def __init__(self, msg_id: str, missing: str) -> None:
        super().__init__(
            f"create reply message fail, message {msg_id} has no property {missing}: only messages sent with request() "
            "can be replied to"
        )
        self.msg_id = msg_id


class EventIdIllegal(ClientError, ValueError):
    """An event id is not one of the stream.

    Args:
        stream: the name of the stream.
        event_id: the id.
        why: the reason.
    """

    def __init__(self, stream: str, event_id: str, why: str) -> None:
        shown = event_id if len(event_id) <= 100 else f"{event_id[:100]}…"
        super().__init__(f"stream {stream} cannot be read after event {shown!r}: {why}; read it from its start")
        self.stream = stream
        self.event_id = event_id


class StreamExpired(ClientError):
    """The events after an event id were deleted: the stream expired, or the broker deleted old messages.

    Args:
        stream: the name of the stream.
        event_id: the id after which the events were requested.
        why: what was deleted.
    """

    def __init__(self, stream: str, event_id: str, why: str) -> None:
        super().__init__(f"stream {stream} has expired after event {event_id!r}: {why}; read it from its start")
        self.stream = stream
        self.event_id = event_id


class ExitCode(enum.IntEnum):
    """The exit codes of the command line."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    NO_SERVER = 3
    REFUSED = 4
    UNKNOWN = 5
    TIMED_OUT = 6
    TLS = 7
    FINDINGS = 8
    INTERRUPTED = 130


_BY_CLASS: tuple[tuple[type[RmqError], ExitCode], ...] = (
    (TlsMismatch, ExitCode.TLS),
    (RequestTimedOut, ExitCode.TIMED_OUT),
    (ReplyTimedOut, ExitCode.TIMED_OUT),
    (RemotingError, ExitCode.NO_SERVER),
    (UnknownName, ExitCode.UNKNOWN),
    (NoRoute, ExitCode.UNKNOWN),
    (SettingsError, ExitCode.USAGE),
)
_BY_RESPONSE = {
    3: ExitCode.NO_SERVER,  # REQUEST_CODE_NOT_SUPPORTED
    16: ExitCode.REFUSED,  # NO_PERMISSION
    215: ExitCode.REFUSED,  # FLOW_CONTROL
    17: ExitCode.UNKNOWN,  # TOPIC_NOT_EXIST
    22: ExitCode.UNKNOWN,  # QUERY_NOT_FOUND
    24: ExitCode.UNKNOWN,  # SUBSCRIPTION_NOT_EXIST
    26: ExitCode.UNKNOWN,  # SUBSCRIPTION_GROUP_NOT_EXIST
    206: ExitCode.UNKNOWN,  # CONSUMER_NOT_ONLINE
    211: ExitCode.UNKNOWN,  # BROKER_NOT_EXIST
    3001: ExitCode.UNKNOWN,  # USER_NOT_EXIST
    3002: ExitCode.UNKNOWN,  # POLICY_NOT_EXIST
}


def exit_code(error: RmqError) -> ExitCode:
    """Return the exit code of the command line for an error."""
    match error:
        # An error that Spark passed on as text has no fields.
        case PeerRefused(code=code):
            return _BY_RESPONSE.get(code, ExitCode.FAILED)
        case SendFailed(cause=RmqError() as cause):
            return exit_code(cause)
        case NoNameServer():
            codes = {exit_code(cause) for cause in getattr(error, "causes", ())}
            return codes.pop() if len(codes) == 1 else ExitCode.NO_SERVER
    return next((code for kind, code in _BY_CLASS if isinstance(error, kind)), ExitCode.FAILED)

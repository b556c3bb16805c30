"""The exception tree; every class carries fields, and its text is derived from them.

::

    RmqError
    ├── ProtocolError            a peer or a file broke a format
    │   ├── FrameError             the byte stream is not a sequence of frames: close the connection
    │   ├── HeaderError            a command header or one of its fields cannot be read
    │   ├── BodyError              a JSON, batch or compressed body cannot be read
    │   │   └── BodyMismatch         a message's body is not of the type that was asked for
    │   └── RecordCorrupt          bytes are not a stored record
    ├── SettingsError            a configuration value cannot be used
    │   └── ExtraMissing           a package of an extra is not installed
    ├── StoreError               the disk side cannot do what was asked
    │   ├── StoreLocked            another process owns the directory
    │   ├── StoreMismatch          files do not have the shape the settings promise
    │   ├── LogDiverged            a slave's log is not the beginning of its master's
    │   └── StoreUnavailable       the log refuses writes (failed flush, shut down, disk full)
    ├── RemotingError            a call over a socket did not get an answer
    │   ├── ConnectFailed
    │   ├── ConnectionLost
    │   ├── RequestTimedOut
    │   ├── WrongProtocol          something else than RocketMQ listens there
    │   └── TlsMismatch            one side encrypts and the other does not, or a certificate is not trusted
    ├── PeerRefused              the peer answered with a code other than success
    ├── UnknownName              there is no topic, group, broker, cluster or message of that name
    └── ClientError              the client cannot do what was asked
        ├── NoRoute                no broker is known for a topic
        │   └── NoNameServer         no name server answered
        ├── MessageIllegal         a message breaks a rule before it is sent
        ├── SendFailed             every try of a send failed
        ├── ReplyTimedOut          a request message was stored and not replied to
        └── NotARequest            a message cannot be replied to

A programmer's mistake is an ``assert`` instead. The command line ends with the `exit_code` of an error:

====  ===========================================================
code  kind
====  ===========================================================
0     done
1     failed for another reason
2     the command line or a setting is not valid
3     no server was reached, or another program listens there
4     refused, because of a permission, a signature or a limit
5     there is no topic, group, broker, cluster or message of that name
6     no answer in time
7     TLS: only one side encrypts, or a certificate is not trusted
====  ===========================================================

Source: style.md §9.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence

__all__ = [
    "BodyError",
    "BodyMismatch",
    "ClientError",
    "ConnectFailed",
    "ConnectionLost",
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
    "TlsMismatch",
    "UnknownName",
    "WrongProtocol",
    "exit_code",
]


class RmqError(Exception):
    """Base of everything rmqkit raises on purpose."""


class ProtocolError(RmqError):
    """Bytes from a peer or a file do not follow their format."""


class FrameError(ProtocolError):
    """The byte stream of a connection is not a sequence of frames; the connection has to be closed."""


class HeaderError(ProtocolError):
    """A command header, or a field of it, cannot be read."""


class BodyError(ProtocolError):
    """The body of a command or of a message cannot be read."""


class BodyMismatch(BodyError):
    """The body of a message is not a value of the type that a program asked for.

    Args:
        type_name: of that type.
        reason: what does not fit, without the values found.
    """

    def __init__(self, type_name: str, reason: str) -> None:
        super().__init__(f"the body is no {type_name}: {reason}")
        self.type_name = type_name
        self.reason = reason


class RecordCorrupt(ProtocolError):
    """Bytes at a position are not a whole stored record.

    Args:
        position: where the record was expected, in bytes from the start of the buffer.
        reason: which check failed.
        size: the record's announced size in bytes if the check came after it was read, else 0.
    """

    def __init__(self, position: int, reason: str, *, size: int = 0) -> None:
        super().__init__(f"no valid record at byte {position}: {reason}")
        self.position = position
        self.reason = reason
        self.size = size


class SettingsError(RmqError):
    """A configuration file, key or value cannot be used."""


class ExtraMissing(SettingsError):
    """A package that this needs is not installed.

    Args:
        what: what needs it.
        package: the package.
        remedy: the command that installs it.
    """

    def __init__(self, what: str, package: str, remedy: str) -> None:
        super().__init__(f"{what} needs {package}, which is not installed: {remedy}")
        self.package = package
        self.remedy = remedy


class StoreError(RmqError):
    """The store cannot do what was asked."""


class StoreLocked(StoreError):
    """Another process has the store directory open."""

    def __init__(self, path: str) -> None:
        super().__init__(f"store {path} is in use by another process: stop that broker or choose another directory")
        self.path = path


class StoreMismatch(StoreError):
    """A file of the store does not have the length or shape that the settings promise."""


class StoreDamaged(StoreError):
    """The log has bytes that are no record before sound ones that a start would cut off.

    Args:
        root: directory of the store.
        physical_offset: where they lie.
        found: what is wrong there, and what lies behind.
    """

    def __init__(self, root: str, physical_offset: int, found: str) -> None:
        super().__init__(
            f"store {root} is damaged: no record lies at {physical_offset} of its commit log ({found}); a start would "
            f"cut that off: run 'rmq store repair {root}', which keeps it, and start again"
        )
        self.physical_offset = physical_offset


class LogDiverged(StoreError):
    """The log of a slave and what its master sends are no one history; following has to end.

    Args:
        physical_offset: where they part.
        found: what was there instead of a continuation.
        remedy: what the operator has to do; empty for the usual.
    """

    def __init__(self, physical_offset: int, found: str, remedy: str = "") -> None:
        remedy = remedy or "if the master's messages are the right ones, move this store away and let it be copied anew"
        super().__init__(f"the log is not its master's from physical offset {physical_offset} on: {found}; {remedy}")
        self.physical_offset = physical_offset
        self.found = found


class StoreUnavailable(StoreError):
    """The store refuses writes until an operator acts."""


class RemotingError(RmqError):
    """A call to a peer got no answer."""


class ConnectFailed(RemotingError):
    """No connection to an address could be made."""

    def __init__(self, address: str, reason: str, remedy: str = "look whether it runs and can be reached") -> None:
        super().__init__(f"cannot connect to {address}: {reason}; {remedy}")
        self.address = address
        self.reason = reason


class ConnectionLost(RemotingError):
    """The connection closed before the answer came."""

    def __init__(self, address: str, reason: str) -> None:
        super().__init__(f"connection to {address} closed before the answer came: {reason}; it may have done its work")
        self.address = address
        self.reason = reason


class RequestTimedOut(RemotingError):
    """No answer came within the budget of the call."""

    def __init__(self, address: str, code: int, timeout_ms: float) -> None:
        super().__init__(
            f"{address} did not answer request {code} within {timeout_ms:.0f} ms; it may have done its work: "
            "look whether it is overloaded, or allow it more time"
        )
        self.address = address
        self.code = code
        self.timeout_ms = timeout_ms


class WrongProtocol(RemotingError):
    """A connection was made to something that does not speak the remoting protocol."""

    def __init__(self, address: str, found: str) -> None:
        super().__init__(
            f"{address} does not speak RocketMQ's protocol: {found}; look at the port: name servers have 9876, brokers "
            "10911, and a gRPC proxy (8081) is none of them"
        )
        self.address = address


class TlsMismatch(RemotingError):
    """One side encrypts and the other does not, or a certificate is not trusted."""

    def __init__(self, address: str, found: str, remedy: str) -> None:
        super().__init__(f"{address}: {found}; {remedy}")
        self.address = address


_NO_PERMISSION = 16
REMEDIES = {
    2: "it is overloaded: send less, or later",
    3: "it is of an older version, has this switched off, or is the other kind of server (broker, name server)",
    13: "change the message's topic, size or properties, or have maxMessageSize raised there",
    14: "wait until it serves; it may be shutting down, a slave, or short of disk",
    _NO_PERMISSION: "have the permission granted: of the topic, the group, the broker or the user",
    17: "create the topic",
    23: "correct the subscription's expression",
    24: "the consumer may have been started just now, or with other topics than the rest of its group",
    25: "members of the group subscribe differently: give all of them the same subscriptions",
    26: "create the group, or have autoCreateSubscriptionGroup=true there",
    206: "start one of its consumers, or correct the name: rmq admin group list",
    215: "it limits its clients: ask less, or later",
}
"""What to do after a response code (remoting.md §5)."""
REMARKS = {
    "Can not update config in black list.": "change it in the server's configuration file, and start it again",
    "username cannot be null.": "sign the requests: give an access key and its secret",
    "check signature failed.": "the secret is not the one of that access key",
    " may not change this server: ": "",
    "recall failed, operation is forbidden": "set recallMessageEnable=true at the broker, also while it runs",
    " is not found.": "correct the access key, or have that user made there",
}
"""What to do after a refusal with NO_PERMISSION, where its remark tells more than the code; nothing when it says so."""


class PeerRefused(RmqError):
    """A peer answered with a code other than success.

    Args:
        code: the response code of the answer.
        remark: the peer's own text, may be empty.
        address: who answered.
    """

    def __init__(self, code: int, remark: str | None, address: str) -> None:
        special = (text for part, text in REMARKS.items() if code == _NO_PERMISSION and part in (remark or ""))
        wanted = next(special, REMEDIES.get(code))
        remedy = f"; {wanted}" if wanted else ""
        told = " ".join((remark or "no remark").partition("\nSee http")[0].split())  # in one line, without the link
        super().__init__(f"{address} answered with code {code}: {told}{remedy}")
        self.code = code
        self.remark = remark or ""
        self.address = address


class UnknownName(RmqError):
    """There is nothing of that name.

    Args:
        kind: what was looked for: topic, group, broker, cluster, message.
        asked: who was asked, as ``name server 127.0.0.1:9876``.
        known: the names there are; the nearest of them is suggested.
        remedy: what to do when no name is near.
    """

    def __init__(self, kind: str, name: str, asked: str, known: Iterable[str] | None = None, remedy: str = "") -> None:
        super().__init__(f"{asked} knows no {kind} {name}{_hint(name, known)}{f'; {remedy}' if remedy else ''}")
        self.kind = kind
        self.name = name
        self.asked = asked


def _hint(name: str, known: Iterable[str] | None) -> str:
    """What the caller may have meant: a near name, or the names there are when they are few."""
    from difflib import get_close_matches

    if known is None:
        return ""
    names = sorted(known)
    near = get_close_matches(name, names, n=1)
    if near:
        return f": did you mean {near[0]}?"
    few = ", ".join(names[:_NAMES_SHOWN]) or "none"
    return f": it knows {few}" + (f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else "")


_NAMES_SHOWN = 5


class ClientError(RmqError):
    """The client cannot do what was asked."""


class NoRoute(ClientError):
    """No broker is known for a topic, or no name server could be asked."""


class NoNameServer(NoRoute):
    """None of the name servers answered.

    Args:
        causes: what happened at each of them.
    """

    def __init__(self, causes: Sequence[RmqError]) -> None:
        super().__init__(f"no name server answered, check the addresses: {'; '.join(map(str, causes))}")
        self.causes = causes


class MessageIllegal(ClientError):
    """A message breaks a rule that is checked before it is sent."""


class SendFailed(ClientError):
    """Every try of a send failed.

    Args:
        topic: where the message was meant to go.
        brokers: broker names in the order they were tried.
        cause: the error of the last try.
    """

    def __init__(self, topic: str, brokers: list[str], cause: Exception) -> None:
        tries = "1 try" if len(brokers) == 1 else f"{len(brokers)} tries"
        outcome = f"not stored after {tries} on {', '.join(dict.fromkeys(brokers))}" if brokers else "not sent"
        super().__init__(f"message for topic {topic} {outcome}: {cause}")
        self.topic = topic
        self.brokers = brokers
        self.cause = cause


class ReplyTimedOut(ClientError):
    """A request message was stored, and no reply to it came in time (``RequestTimeoutException``).
    ``code`` is the reference's number for it."""

    code = 10006

    def __init__(self, topic: str, timeout_ms: float) -> None:
        super().__init__(
            f"send request message to <{topic}> OK, but wait reply message timeout, {timeout_ms:.0f} ms.: does a "
            "consumer of the topic reply?"
        )
        self.topic = topic
        self.timeout_ms = timeout_ms


class NotARequest(ClientError):
    """A message does not say whom to reply to. ``code`` is the reference's number for it."""

    code = 10007

    def __init__(self, msg_id: str, missing: str) -> None:
        super().__init__(
            f"create reply message fail, message {msg_id} has no property {missing}: only messages sent with request() "
            "can be replied to"
        )
        self.msg_id = msg_id


class ExitCode(enum.IntEnum):
    """How the command line ends; the table is at the top."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    NO_SERVER = 3
    REFUSED = 4
    UNKNOWN = 5
    TIMED_OUT = 6
    TLS = 7


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
    """With which code the command line ends after an error."""
    match error:
        case PeerRefused():
            return _BY_RESPONSE.get(error.code, ExitCode.FAILED)
        case SendFailed(cause=RmqError() as cause):
            return exit_code(cause)
        case NoNameServer():
            codes = {exit_code(cause) for cause in error.causes}
            return codes.pop() if len(codes) == 1 else ExitCode.NO_SERVER
    return next((code for kind, code in _BY_CLASS if isinstance(error, kind)), ExitCode.FAILED)

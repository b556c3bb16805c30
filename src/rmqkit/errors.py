"""The exception tree; every class carries fields, and its text is derived from them.

::

    RmqError
    ├── ProtocolError            a peer or a file broke a format
    │   ├── FrameError             the byte stream is not a sequence of frames: close the connection
    │   ├── HeaderError            a command header or one of its fields cannot be read
    │   ├── BodyError              a JSON, batch or compressed body cannot be read
    │   └── RecordCorrupt          bytes are not a stored record
    ├── SettingsError            a configuration value cannot be used
    ├── StoreError               the disk side cannot do what was asked
    │   ├── StoreLocked            another process owns the directory
    │   ├── StoreMismatch          files do not have the shape the settings promise
    │   └── StoreUnavailable       the log refuses writes (failed flush, shut down, disk full)
    ├── RemotingError            a call over a socket did not get an answer
    │   ├── ConnectFailed
    │   ├── ConnectionLost
    │   └── RequestTimedOut
    ├── PeerRefused              the peer answered with a code other than success
    └── ClientError              the client cannot do what was asked
        ├── NoRoute                no broker is known for a topic
        ├── MessageIllegal         a message breaks a rule before it is sent
        ├── SendFailed             every try of a send failed
        ├── ReplyTimedOut          a request message was stored and not replied to
        └── NotARequest            a message cannot be replied to

A programmer's mistake is an ``assert`` instead. Source: style.md §9.
"""

from __future__ import annotations

__all__ = [
    "BodyError",
    "ClientError",
    "ConnectFailed",
    "ConnectionLost",
    "FrameError",
    "HeaderError",
    "MessageIllegal",
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


class StoreError(RmqError):
    """The store cannot do what was asked."""


class StoreLocked(StoreError):
    """Another process has the store directory open."""

    def __init__(self, path: str) -> None:
        super().__init__(f"store {path} is in use by another process: stop that broker or choose another directory")
        self.path = path


class StoreMismatch(StoreError):
    """A file of the store does not have the length or shape that the settings promise."""


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


REMEDIES = {
    2: "it is overloaded: send less, or later",
    3: "it is of an older version, or has this switched off",
    13: "change the message's topic, size or properties",
    14: "wait until it serves; it may be shutting down, a slave, or short of disk",
    16: "have the permission granted: of the topic, the group, the broker or the user",
    17: "create the topic",
    23: "correct the subscription's expression",
    24: "the consumer may have been started just now, or with other topics than the rest of its group",
    25: "members of the group subscribe differently: give all of them the same subscriptions",
    26: "create the group, or have autoCreateSubscriptionGroup=true there",
    215: "it limits its clients: ask less, or later",
}
"""What to do after a response code (remoting.md §5)."""


class PeerRefused(RmqError):
    """A peer answered with a code other than success.

    Args:
        code: the response code (remoting.md §5).
        remark: the peer's own text, may be empty.
        address: who answered.
    """

    def __init__(self, code: int, remark: str | None, address: str) -> None:
        remedy = f"; {REMEDIES[code]}" if code in REMEDIES else ""
        super().__init__(f"{address} answered with code {code}: {remark or 'no remark'}{remedy}")
        self.code = code
        self.remark = remark or ""
        self.address = address


class ClientError(RmqError):
    """The client cannot do what was asked."""


class NoRoute(ClientError):
    """No broker is known for a topic, or no name server could be asked."""


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
        outcome = f"not stored after {tries} on {', '.join(brokers)}" if brokers else "not sent"
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

"""The authorization of requests of known users (``AclAuthorizationHandler``).

The broker refuses a request unless the policies of its user allow everything that the request needs (`rmqkit.rights`).
Super users and the broker's own requests need no policy.

Each resource that a request needs is checked once, even if its body or header contains the resource several times. The
index of the user's policies (`PolicyIndex`) is cached until policies change. A record at a physical offset is accepted
as a message only if its queue contains the record, because a body may look like a record.

Use this module only on the event loop. Source: behaviour.md §9.8.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from rmqkit.broker.access.users import AccessTable
from rmqkit.errors import RecordCorrupt
from rmqkit.policies import SUPER, Actions, PolicyIndex, Resource, topic_resource
from rmqkit.protocol.command import Command
from rmqkit.protocol.record import Record, decode_record
from rmqkit.rights import NotReadable, needed
from rmqkit.store.message_store import MessageStore

_PUBLISHES = frozenset(["Pub"])


class Authorization:
    """The authorization of requests by the policies of an `AccessTable`.
    ``cluster``: the cluster of the broker, which is a resource. ``inner``: the user name that signs requests of
    brokers, or None. ``white_list``: codes of requests that need no right. ``message_at``: reads a message of the
    store."""

    def __init__(
        self,
        access: AccessTable,
        cluster: str,
        inner: str | None,
        white_list: Collection[int] = (),
        message_at: Callable[[int], Record | None] = lambda physical_offset: None,
    ) -> None:
        self._access = access
        self._cluster = cluster
        self._inner = inner
        self._white_list = frozenset(white_list)
        self._message_at = message_at
        self._indexes: dict[str, PolicyIndex] = {}
        self._indexed = access.acls

    def refusal(
        self, user: str | None, fields: Mapping[str, str], command: Command, addresses: Sequence[str]
    ) -> str | None:
        """Return the reference's remark for a request that is not allowed, or None.
        ``user``: the user that signed the request; None if it is unsigned or needs no signature. ``fields``: the
        extFields of the request. ``addresses``: the addresses of the peer and of its balancer. Policies have to allow
        the request from each of them."""
        # A request without fields needs no right, as in the reference.
        if command.code in self._white_list or not fields or self._is_free(user):
            return None
        try:
            wanted = needed(command, fields, self._cluster, self._message_at)
            return self._first_refusal(user, wanted, addresses)
        except NotReadable:
            return "parse authorization context error."

    def grpc_refusal(
        self, user: str | None, wanted: Iterable[tuple[Resource, Actions]], addresses: Sequence[str]
    ) -> str | None:
        """Return the reference's remark for a gRPC call that is not allowed, or None."""
        return None if self._is_free(user) else self._first_refusal(user, wanted, addresses)

    def _first_refusal(
        self, user: str | None, wanted: Iterable[tuple[Resource, Actions]], addresses: Sequence[str]
    ) -> str | None:
        # Look up the user only when a resource is needed: a request that needs no right is allowed for every user.
        index: PolicyIndex | None = None
        for resource, actions in wanted:
            if index is None:
                if user is None:
                    return "Authorization failed. Please verify your access rights and try again."
                if user not in self._access.users:
                    return f"User:{user} not found."
                index = self._index(user)
            remark = index.refusal(resource, actions, addresses)
            if remark is not None:
                return remark
        return None

    def may_publish(self, user: str | None, topic: str, addresses: Sequence[str]) -> bool:
        """Return True if a user has the right to see the messages that producers send to a topic."""
        if self._is_free(user):
            return True
        if user is None or user not in self._access.users:
            return False
        return self._index(user).remark(topic_resource(topic), _PUBLISHES, addresses) is None

    def _is_free(self, user: str | None) -> bool:
        if user is None:
            return False
        # The inner name takes precedence over a user with the same name: an operator cannot revoke the rights of
        # brokers by mistake.
        known = self._access.users.get(user)
        return user == self._inner or (known is not None and known.user_type == SUPER)

    def _index(self, user: str) -> PolicyIndex:
        # Compare by identity: every change replaces the table.
        if self._indexed is not self._access.acls:
            self._indexes, self._indexed = {}, self._access.acls
        index = self._indexes.get(user)
        if index is None:
            # The callers have checked that the user exists. Otherwise invented names would fill the table.
            index = self._indexes[user] = PolicyIndex(user, self._indexed.get(f"User:{user}"))
        return index


def message_at(store: MessageStore, physical_offset: int) -> Record | None:
    """Return the message at a physical offset, or None if no record begins there.
    Raises NotReadable: the record is not a message, or its queue does not have the record at its offset (yet)."""
    store.dispatch()  # otherwise messages of this tick would be refused, because they have no queue entry yet
    raw = store.log.record_at(physical_offset) if physical_offset >= 0 else None
    try:
        record = None if raw is None else decode_record(raw)
    except RecordCorrupt:
        raise NotReadable from None
    if record is not None:
        found = store.entries(record.topic, record.queue_id, record.queue_offset, count_max=1)
        if [(at, size) for _, at, size, _ in found] != [(physical_offset, record.size)]:
            raise NotReadable
    return record

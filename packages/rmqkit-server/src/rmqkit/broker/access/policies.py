"""Authorization of known users (``AclAuthorizationHandler``): the broker refuses a request unless a policy of its user
allows everything that the request needs (`rmqkit.rights`). Super users and the broker's own requests need no policy.

Each need of a request is judged once, even if its body or header names it several times. The index of the user's
policies (`PolicyIndex`) is valid until policies change. The record at a physical offset counts as a message only if its
queue contains it, because a body may look like a record.

Loop only. Source: behaviour.md §9.8.
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
    """Judges requests by the policies of an `AccessTable`.
    ``cluster``: whose resource the broker is; ``inner``: the name in brokers' own requests, if they are signed;
    ``white_list``: codes of requests that need no right; ``message_at``: of the broker's store."""

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
        """The reference's remark for a request that is not allowed, or None.
        ``user``: who signed it; None: nobody did, or nobody had to. ``fields``: its extFields.
        ``addresses``: the peer's and its balancer's: policies have to allow it from each."""
        # As the reference: a request without fields names nothing that a right could be needed for.
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
        """The reference's remark for a call of gRPC that is not allowed, or None."""
        return None if self._is_free(user) else self._first_refusal(user, wanted, addresses)

    def _first_refusal(
        self, user: str | None, wanted: Iterable[tuple[Resource, Actions]], addresses: Sequence[str]
    ) -> str | None:
        # The user is looked up with the first need: what needs no right is let in, whoever asks.
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
        """Return True if a user may see a message to a topic that one of its producers sent."""
        if self._is_free(user):
            return True
        if user is None or user not in self._access.users:
            return False
        return self._index(user).remark(topic_resource(topic), _PUBLISHES, addresses) is None

    def _is_free(self, user: str | None) -> bool:
        if user is None:
            return False
        # The inner name goes before a user of that name: operators cannot take brokers' rights away by mistake.
        known = self._access.users.get(user)
        return user == self._inner or (known is not None and known.user_type == SUPER)

    def _index(self, user: str) -> PolicyIndex:
        # By identity: the table is replaced with every change, so nobody has to be notified.
        if self._indexed is not self._access.acls:
            self._indexes, self._indexed = {}, self._access.acls
        index = self._indexes.get(user)
        if index is None:
            # Only of users that exist, which was looked at before: made up names would fill it.
            index = self._indexes[user] = PolicyIndex(user, self._indexed.get(f"User:{user}"))
        return index


def message_at(store: MessageStore, physical_offset: int) -> Record | None:
    """The message at a physical offset, None where none begins.
    Raises NotReadable: it is none, or its queue does not know it (yet), or knows another one of that number."""
    store.dispatch()  # what was put in this tick has no queue entry yet, and would be refused
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

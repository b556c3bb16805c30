"""What a known user may do (``AclAuthorizationHandler``): a request is refused unless a policy of its user allows all
that it needs (`rmqkit.broker.access.rights`). Super users and the broker's own requests need no policy.

Of the entries that match resource, action and address the most special one decides: a whole name before a prefix, a
longer prefix before a shorter one. Entries of ``Default`` policies are looked at when none of ``Custom`` matches.
Who asks for the same once more is answered from memory until policies change. What lies at a physical offset is taken
for a message only when its queue says so, as a body may look like a record. Loop only. Source: behaviour.md §9.8.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Collection, Mapping, Sequence

from rmqkit.broker.access.rights import Actions, NotReadable, needed, topic_resource
from rmqkit.broker.access.users import SUPER, AccessTable
from rmqkit.errors import RecordCorrupt
from rmqkit.protocol.command import Command
from rmqkit.protocol.record import Record, decode_record
from rmqkit.protocol.schemas.access import AclEntry, AclInfo
from rmqkit.store.message_store import MessageStore

__all__ = ["Authorization", "message_at", "objection"]

_JUDGED_MAX = 10_000
_NAME_CHARACTERS_MAX = 300  # more than any real one: senders of others could fill the memory
_ALL = frozenset(["All"])
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
        self._judged: dict[tuple[str, str, Actions, str], str | None] = {}
        self._judged_by = access.acls

    def refusal(
        self, user: str | None, fields: Mapping[str, str], command: Command, addresses: Sequence[str]
    ) -> str | None:
        """The reference's remark for a request that is not allowed, or None.
        ``user``: who signed it; None: nobody did, or nobody had to. ``fields``: its extFields.
        ``addresses``: the peer's and its balancer's: policies have to allow it from each."""
        if command.code in self._white_list or not fields or self._is_free(user):
            return None
        try:
            for resource, actions in needed(command, fields, self._cluster, self._message_at):
                if user is None:
                    return "Authorization failed. Please verify your access rights and try again."
                if user not in self._access.users:
                    return f"User:{user} not found."
                either = (resource,) if isinstance(resource, str) else resource
                remarks = [self._remark(user, one, actions, addresses) for one in either]
                if None not in remarks:
                    return remarks[0]
        except NotReadable:
            return "parse authorization context error."
        return None

    def may_publish(self, user: str | None, topic: str, addresses: Sequence[str]) -> bool:
        """Whether a user may be told of a message to a topic that one of its producers sent."""
        if self._is_free(user):
            return True
        known = user is not None and user in self._access.users
        return known and self._remark(str(user), topic_resource(topic), _PUBLISHES, addresses) is None

    def _is_free(self, user: str | None) -> bool:
        if user is None:
            return False
        known = self._access.users.get(user)
        return user == self._inner or (known is not None and known.user_type == SUPER)

    def _remark(self, user: str, resource: str, actions: Actions, addresses: Sequence[str]) -> str | None:
        """The remark for the first address from which an action is not allowed, or None."""
        return next(filter(None, (self._remark_from(user, resource, actions, ip) for ip in addresses or ("?",))), None)

    def _remark_from(self, user: str, resource: str, actions: Actions, ip: str) -> str | None:
        if self._judged_by is not self._access.acls or len(self._judged) >= _JUDGED_MAX:
            self._judged, self._judged_by = {}, self._access.acls
        key = user, resource, actions, ip
        if key in self._judged:
            return self._judged[key]
        subject = f"User:{user}"
        why = objection(self._judged_by.get(subject), resource, actions, ip)
        remark = None if why is None else f"{subject} has no permission to access {resource} from {ip}, {why}"
        if len(resource) <= _NAME_CHARACTERS_MAX:
            self._judged[key] = remark
        return remark


def message_at(store: MessageStore, physical_offset: int) -> Record | None:
    """The message at a physical offset, None where none begins.
    Raises NotReadable: it is none, or its queue does not know it (yet), or knows another one of that number."""
    store.dispatch()
    raw = store.record_at(physical_offset) if physical_offset >= 0 else None
    try:
        record = None if raw is None else decode_record(raw)
    except RecordCorrupt:
        raise NotReadable from None
    if record is not None:
        found = store.entries(record.topic, record.queue_id, record.queue_offset, count_max=1)
        if [(at, size) for _, at, size, _ in found] != [(physical_offset, record.size)]:
            raise NotReadable
    return record


def objection(acl: AclInfo | None, resource: str, actions: Actions, ip: str) -> str | None:
    """Why policies do not allow one of some actions on a resource (``Topic:orders``) to somebody at an address, in the
    reference's words; None when they do."""
    for policy_type in ("Custom", "Default"):
        matching = [
            entry
            for policy in (() if acl is None else acl.policies)
            if policy.policy_type == policy_type
            for entry in policy.entries
            if _matches(entry, resource, actions, ip)
        ]
        if matching:
            entry = max(matching, key=lambda entry: (not entry.resource.endswith("*"), len(entry.resource)))
            return None if entry.decision == "Allow" else "the decision is deny."
    return "no matched policies."


def _matches(entry: AclEntry, resource: str, actions: Actions, ip: str) -> bool:
    """Kept resources end with a star if they are a prefix; ``*`` alone is everything."""
    name = entry.resource
    if name != resource and not (name.endswith("*") and resource.startswith(name[:-1])):
        return False
    if (actions | _ALL).isdisjoint(entry.actions):
        return False
    return not entry.source_ips or _is_in(entry.source_ips, ip)


def _is_in(networks: Sequence[str], ip: str) -> bool:
    try:
        address = ipaddress.ip_address(ip)
    except ValueError:
        return False
    return any(address in ipaddress.ip_network(network, strict=False) for network in networks)

"""What a known user may do (``AclAuthorizationHandler``): a request is refused unless a policy of its user allows all
that it needs (`rmqkit.broker.access.rights`). Super users and the broker's own requests need no policy.

Each need of a request is judged once, however often its body or header names it, and by an index of the user's
policies (`PolicyIndex`), which holds until policies change. What lies at a physical offset is taken for a message only
when its queue says so, as a body may look like a record.

Of the entries that match resource, action and address the most special one decides: a whole name before a prefix, a
longer prefix before a shorter one. Entries of ``Default`` policies are looked at when none of ``Custom`` matches. The
reference filters and sorts all of them for each resource; the index looks at few:

============  =====================================  ==============================================================
entries       kept in                                cost of a judgement
============  =====================================  ==============================================================
whole names   a dict                                 one look-up
prefixes      a sorted list; each knows the longest  a binary search, and a step for each prefix around the one it
              other one that it begins with          finds: everything that a resource begins with is among them
networks      their texts; each entry remembers      3 µs for each network of an address that is new to an entry
              addresses that it was asked about
============  =====================================  ==============================================================

Loop only. Source: behaviour.md §9.8.
"""

from __future__ import annotations

import ipaddress
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import lru_cache

from rmqkit.broker.access.rights import Actions, NotReadable, Resource, needed, topic_resource
from rmqkit.broker.access.users import SUPER, AccessTable
from rmqkit.errors import RecordCorrupt
from rmqkit.protocol.command import Command
from rmqkit.protocol.record import Record, decode_record
from rmqkit.protocol.schemas.access import AclEntry, AclInfo
from rmqkit.store.message_store import MessageStore

_ADDRESSES_MAX = 100


class PolicyIndex:
    """Judges by the policies of a user, as they were when it was made."""

    __slots__ = ("_types", "_user")

    def __init__(self, user: str, acl: AclInfo | None) -> None:
        policies = [] if acl is None else acl.policies
        self._user = user
        types = (
            _Entries([entry for policy in policies if policy.policy_type == policy_type for entry in policy.entries])
            for policy_type in ("Custom", "Default")
        )
        self._types = [entries for entries in types if entries.count]

    def remark(self, resource: str, actions: Actions, addresses: Sequence[str]) -> str | None:
        """Why policies do not allow one of some actions on a resource (``Topic:orders``) from the first of some
        addresses that they do not allow it from, in the reference's words; None when they do from each."""
        for ip in addresses or ("?",):
            for entries in self._types:
                decisive = entries.decisive(resource, actions, ip)
                if decisive is not None:
                    break
            else:
                return self._refused(resource, ip, "no matched policies.")
            if not decisive.allows:
                return self._refused(resource, ip, "the decision is deny.")
        return None

    def _refused(self, resource: str, ip: str, why: str) -> str:
        return f"User:{self._user} has no permission to access {resource} from {ip}, {why}"


class _Entry:
    """What one entry says; its resource is known from where it is kept."""

    __slots__ = ("_actions", "_by_address", "_networks", "_of_all", "allows")

    def __init__(self, entry: AclEntry) -> None:
        self.allows = entry.decision == "Allow"
        self._actions = frozenset(entry.actions)
        self._of_all = "All" in self._actions
        self._networks = entry.source_ips
        self._by_address: dict[str, bool] = {}

    def concerns(self, actions: Actions, ip: str) -> bool:
        if not self._of_all and self._actions.isdisjoint(actions):
            return False
        if not self._networks:
            return True
        known = self._by_address.get(ip)
        if known is None:
            if len(self._by_address) >= _ADDRESSES_MAX:
                self._by_address.clear()
            known = self._by_address[ip] = _is_in(self._networks, ip)
        return known


class _Entries:
    """The entries of one policy type. Kept resources end with a star if they are a prefix; ``*`` is everything."""

    __slots__ = ("_names", "_prefixed", "_prefixes", "count")

    def __init__(self, entries: Sequence[AclEntry]) -> None:
        self.count = len(entries)
        self._names: dict[str, list[_Entry]] = {}
        by_prefix: dict[str, list[_Entry]] = {}
        for entry in entries:
            name = entry.resource
            alike = by_prefix.setdefault(name[:-1], []) if name.endswith("*") else self._names.setdefault(name, [])
            alike.append(_Entry(entry))
        self._prefixes = sorted(by_prefix)
        self._prefixed: list[tuple[list[_Entry], int]] = []
        around: list[int] = []
        for index, prefix in enumerate(self._prefixes):
            # Sorted, a prefix stands behind all that it begins with: a stack of those that are still open finds the
            # longest one in one pass.
            while around and not prefix.startswith(self._prefixes[around[-1]]):
                around.pop()
            self._prefixed.append((by_prefix[prefix], around[-1] if around else -1))
            around.append(index)

    def decisive(self, resource: str, actions: Actions, ip: str) -> _Entry | None:
        # Entries of one resource stand in the order in which they were given: the first that matches decides.
        for entry in self._names.get(resource, ()):
            if entry.concerns(actions, ip):
                return entry
        prefixes = self._prefixes
        index = bisect_right(prefixes, resource) - 1
        while index >= 0:
            entries, around = self._prefixed[index]
            if resource.startswith(prefixes[index]):
                for entry in entries:
                    if entry.concerns(actions, ip):
                        return entry
            assert around < index, "the way to shorter prefixes leads back in the list, and ends"
            index = around
        return None


def _is_in(networks: Iterable[str], ip: str) -> bool:
    try:
        address = ipaddress.ip_address(ip)
    except ValueError:
        return False
    return any(address in _network(network) for network in networks)


@lru_cache(maxsize=10_000)
def _network(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
    return ipaddress.ip_network(text, strict=False)


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
        index: PolicyIndex | None = None
        for resource, actions in wanted:
            if index is None:
                if user is None:
                    return "Authorization failed. Please verify your access rights and try again."
                if user not in self._access.users:
                    return f"User:{user} not found."
                index = self._index(user)
            if isinstance(resource, str):
                remark = index.remark(resource, actions, addresses)
            else:
                remarks = [index.remark(one, actions, addresses) for one in resource]
                remark = None if None in remarks else remarks[0]
            if remark is not None:
                return remark
        return None

    def may_publish(self, user: str | None, topic: str, addresses: Sequence[str]) -> bool:
        """Whether a user may see a message to a topic that one of its producers sent."""
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

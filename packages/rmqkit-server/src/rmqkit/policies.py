"""The policies of one user: an index finds the entry that decides on a resource, an action and an address.

Among the entries that match resource, action and address the most special entry decides: a whole name before a prefix,
a longer prefix before a shorter one. Entries of ``Default`` policies decide only if no entry of ``Custom`` matches. The
reference filters and sorts all entries for each resource. The index reads only a few entries:

============  =====================================  ==============================================================
entries       stored in                              cost of a decision
============  =====================================  ==============================================================
whole names   a dict                                 one look-up
prefixes      a sorted list; each prefix stores the  a binary search, and a step for each shorter prefix of the
              longest other prefix that it begins    prefix found: all prefixes of a resource are among these
              with
networks      their texts; each entry caches the       3 µs for each network of an entry, if the address is new
              results by address
============  =====================================  ==============================================================

Brokers use the index for their own policies (`rmqkit.broker.access.policies`), and proxies for policies that they read
from brokers (`rmqkit.proxy.remote.users`). Use this module only on the event loop. Source: behaviour.md §9.8.
"""

from __future__ import annotations

import ipaddress
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import lru_cache

from rmqkit.protocol.names import RETRY_PREFIX
from rmqkit.protocol.schemas.access import AclEntry, AclInfo

__all__ = ["SUPER", "Actions", "PolicyIndex", "Resource", "group_resource", "topic_resource"]

SUPER = "Super"
"""The type of users who have all permissions."""

Actions = frozenset[str]

Resource = str | tuple[str, ...]
"""``Topic:orders``, ``Group:g`` or ``Cluster:c``. If a list has several resources, a permission on one of them is
enough."""

_ADDRESSES_MAX = 100


def topic_resource(topic: str) -> str:
    """Return the resource for a permission on a topic. The resource of a retry topic is its group."""
    return group_resource(topic) if topic.startswith(RETRY_PREFIX) else f"Topic:{topic}"


def group_resource(name: str) -> str:
    """Return the resource for a permission on a group, or on its retry topic."""
    return f"Group:{name.removeprefix(RETRY_PREFIX)}"


class PolicyIndex:
    """An index of a user's policies, as they were when the index was made."""

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
        """Return the reference's text of the refusal, or None if policies allow one of the actions on a resource
        (``Topic:orders``) from every address. The text names the first address that is not allowed."""
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

    def refusal(self, resource: Resource, actions: Actions, addresses: Sequence[str]) -> str | None:
        """Return `remark` for a resource. For several resources, return None if one of them is allowed."""
        if isinstance(resource, str):
            return self.remark(resource, actions, addresses)
        remarks = [self.remark(one, actions, addresses) for one in resource]
        return None if None in remarks else remarks[0]

    def _refused(self, resource: str, ip: str, why: str) -> str:
        return f"User:{self._user} has no permission to access {resource} from {ip}, {why}"


class _Entry:
    """One entry of a policy, without its resource: `_Entries` stores entries by resource."""

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
    """The entries of one policy type. A resource that ends with a star is a prefix; ``*`` matches everything."""

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
            # In sorted order, a prefix follows all prefixes that it begins with. A stack of these prefixes finds the
            # longest of them in one pass.
            while around and not prefix.startswith(self._prefixes[around[-1]]):
                around.pop()
            self._prefixed.append((by_prefix[prefix], around[-1] if around else -1))
            around.append(index)

    def decisive(self, resource: str, actions: Actions, ip: str) -> _Entry | None:
        # Entries of one resource have the order of the policies: the first matching entry decides.
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
            assert around < index, "a shorter prefix has a lower index"
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

"""The users and policies of ACL 2.0: list, create, change, delete (``createUser`` … ``deleteAcl``, codes 3001 to 3010).

Each broker stores its own users. A user that is changed at one broker differs from the same user at the other brokers.
Therefore all results are by broker name, and a change is sent to all masters unless the caller names one broker.
Brokers return secrets with the users; the secrets are dropped when the answer is decoded. Brokers of version 4.9 do not
know these requests.
Source: behaviour.md §9.8; remoting.md §4.4.1, §6.4.14.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import Struct

from rmqkit.admin.calls import AdminCalls, Done
from rmqkit.policies import SUPER, PolicyIndex
from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.schemas.access import (
    AclEntry,
    AclInfo,
    AclPolicy,
    DeleteAclRequest,
    ListAclsRequest,
    ListUsersRequest,
    SubjectRequest,
    UserInfo,
    UserRequest,
)
from rmqkit.sentences import _

__all__ = ["ACTIONS", "Access", "UserRow", "may", "subject_of"]

ACTIONS = ("All", "Pub", "Sub", "Create", "Update", "Delete", "Get", "List")


class UserRow(Struct, rename="camel", kw_only=True):
    """A user at a broker, without its secret. Types are ``Super``, ``Normal``; statuses are ``enable``, ``disable``."""

    broker_name: str
    username: str
    user_type: str
    user_status: str


def subject_of(user: str) -> str:
    """Return the subject for a user in policies."""
    return f"User:{user}"


def may(user: str, user_type: str, acl: AclInfo | None, resource: str, action: str, ip: str) -> str:
    """Return the remark with which a broker refuses the action of a user on a resource (``Topic:Orders``) from an
    address. The remark is empty if the user has the permission. This function is pure."""
    if user_type == SUPER:
        return ""
    return PolicyIndex(user, acl).remark(resource, frozenset((action,)), (ip,)) or ""


class Access:
    """Operations on users and policies. Each raises the errors of `AdminCalls`. PeerRefused has the broker's remark:
    the caller has no permission, or an argument is not valid."""

    def __init__(self, calls: AdminCalls) -> None:
        self._calls = calls

    async def users(self, part: str = "", broker: str | None = None) -> list[UserRow]:
        """Return the users with ``part`` in their names, at each broker."""
        code, header = RequestCode.AUTH_LIST_USER, ListUsersRequest(part or None)
        rows = []
        for name, address in (await self._calls.masters(broker=broker)).items():
            body = (await self._calls.ask(address, code, header)).payload
            for user in msgspec.json.decode(body, type=list[UserInfo]) if body else ():
                kind, status = user.user_type or "Normal", user.user_status or "enable"
                row = UserRow(broker_name=name, username=user.username or "", user_type=kind, user_status=status)
                rows.append(row)
        return sorted(rows, key=lambda row: (row.username, row.broker_name))

    async def policies(self, part: str = "", broker: str | None = None) -> dict[str, list[AclInfo]]:
        """Return the policies of the users with ``part`` in their names, by broker name."""
        code, header = RequestCode.AUTH_LIST_ACL, ListAclsRequest(part or None)
        found = {}
        for name, address in (await self._calls.masters(broker=broker)).items():
            body = (await self._calls.ask(address, code, header)).payload
            found[name] = (msgspec.json.decode(body, type=list[AclInfo] | None) or []) if body else []
        return found

    async def create_user(
        self, user: str, secret: str, user_type: str = "Normal", broker: str | None = None
    ) -> list[Done]:
        """Create a user. Raises PeerRefused: the user exists, or the caller has no permission."""
        body = UserInfo(username=user, password=secret, user_type=user_type, user_status="enable")
        return await self._each(RequestCode.AUTH_CREATE_USER, user, _("created"), broker, UserRequest(user), body)

    async def update_user(
        self, user: str, *, secret: str = "", user_type: str = "", status: str = "", broker: str | None = None
    ) -> list[Done]:
        """Change the fields of a user for which a value is passed. Raises PeerRefused: there is no such user."""
        body = UserInfo(username=user, password=secret or None, user_type=user_type or None, user_status=status or None)
        return await self._each(RequestCode.AUTH_UPDATE_USER, user, "changed", broker, UserRequest(user), body)

    async def delete_user(self, user: str, broker: str | None = None) -> list[Done]:
        """Delete a user. An rmqkit broker also deletes the user's policies."""
        return await self._each(RequestCode.AUTH_DELETE_USER, user, _("deleted"), broker, UserRequest(user))

    async def put_policy(
        self,
        user: str,
        resource: str,
        actions: Sequence[str],
        *,
        decision: str = "Allow",
        networks: Sequence[str] = (),
        broker: str | None = None,
    ) -> list[Done]:
        """Set the policy of a user on a resource (``Topic:Orders``, ``Group:bill*`` or ``*``), for some networks or for
        all. The new policy replaces the former policy on the resource.
        Raises PeerRefused: there is no such user, or an argument is not valid."""
        entry = AclEntry(resource=resource, actions=list(actions), source_ips=list(networks) or None, decision=decision)
        subject = subject_of(user)
        policies = [AclPolicy(policy_type="Custom", entries=[entry])]
        body = AclInfo(subject=subject, policies=policies)
        done = []
        for name, address in (await self._calls.masters(broker=broker)).items():
            known = await self._calls.ask(address, RequestCode.AUTH_GET_ACL, SubjectRequest(subject))
            # Apache's brokers refuse to create policies of a subject that has policies, and to update missing policies.
            code = RequestCode.AUTH_UPDATE_ACL if known.payload else RequestCode.AUTH_CREATE_ACL
            await self._calls.ask(address, code, SubjectRequest(subject), body=msgspec.json.encode(body))
            done.append(
                Done(
                    name,
                    _(
                        "{user}: {decision} {actions} on {resource}",
                        user=user,
                        decision=_(decision),
                        actions=",".join(actions),
                        resource=resource,
                    ),
                )
            )
        return done

    async def delete_policy(self, user: str, resource: str = "", broker: str | None = None) -> list[Done]:
        """Delete the policy of a user on a resource, or all its policies. Raises PeerRefused: there is no policy."""
        header = DeleteAclRequest(subject_of(user), "Custom" if resource else None, resource or None)
        change = _("policy on {resource} deleted", resource=resource) if resource else _("policies deleted")
        return await self._each(RequestCode.AUTH_DELETE_ACL, user, change, broker, header)

    async def _each(
        self, code: int, user: str, change: str, broker: str | None, header: Struct, body: Struct | None = None
    ) -> list[Done]:
        masters = await self._calls.masters(broker=broker)
        content = b"" if body is None else msgspec.json.encode(body)
        for address in masters.values():
            await self._calls.ask(address, code, header, body=content)
        return [Done(name, _("user {user} {change}", user=user, change=change)) for name in masters]

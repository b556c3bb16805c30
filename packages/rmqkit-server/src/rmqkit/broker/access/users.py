"""Users and their policies (``LocalAuthenticationMetadataProvider``, ``LocalAuthorizationMetadataProvider``).

Users and policies are stored in ``config/access.json``. Only the owner of the file can read it, because it contains the
users' secrets. The reference stores both in RocksDB databases, and the format of this file is rmqkit's own. A change is
on the disk before the answer.

Codes 3001 to 3010 read and change users and policies (``AdminBrokerProcessor``; `mqadmin createUser`, ``createAcl`` and
the like). Only clients that have the right to change the server can change users and policies. Only these clients can
read users, because the answer contains the users' secrets. `rmqkit.broker.access.policies` checks requests. Use this
module only on the event loop. Source: behaviour.md §9.8; remoting.md §4.4.1, §6.4.14.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec
from msgspec import Struct, field

from rmqkit.broker.handlers import Handlers, OwnAddress, answers
from rmqkit.broker.settings import BrokerSettings
from rmqkit.errors import PeerRefused
from rmqkit.policies import SUPER
from rmqkit.protocol.acl import ACCESS_KEY
from rmqkit.protocol.codes import RequestCode, ResponseCode, request_name
from rmqkit.protocol.command import Command, decode_fields, decode_header_leniently, reply
from rmqkit.protocol.schemas.access import (
    AclEntry,
    AclInfo,
    AclPolicy,
    DeleteAclRequest,
    ListAclsRequest,
    ListUsersRequest,
    UserInfo,
)
from rmqkit.remoting.connection import Connection
from rmqkit.remoting.router import decode_body
from rmqkit.store.files import JsonFile

_OWNER_ALONE = 0o600
_USER = "User"
_USER_TYPES = (SUPER, "Normal")
_USER_STATES = ("enable", "disable")
_POLICY_TYPES = ("Custom", "Default")
_DECISIONS = ("Allow", "Deny")
_ACTIONS = ("All", "Any", "Pub", "Sub", "Create", "Update", "Delete", "Get", "List")
_RESOURCE_TYPES = ("Any", "Cluster", "Namespace", "Topic", "Group")
_ENTRIES_MAX, _NETWORKS_MAX, _ENTRIES_OF_SUBJECT_MAX = 2000, 2000, 4000


class _Stored(Struct):
    users: dict[str, UserInfo] = field(default_factory=dict)
    acls: dict[str, AclInfo] = field(default_factory=dict)


class AccessTable:
    """The users by name, and the policies of each subject (``User:<name>``). A refused change raises PeerRefused with
    the reference's code and remark. ``address``: the address of this broker, for the refusals."""

    def __init__(self, folder: Path, address: str) -> None:
        self._file = JsonFile(folder / "access.json", mode=_OWNER_ALONE)
        self._address = address
        self._stored = _Stored()

    def load(self) -> None:
        self._stored = self._file.load(_Stored) or _Stored()

    @property
    def users(self) -> Mapping[str, UserInfo]:
        """All users with their secrets, read-only. Every change replaces the mapping."""
        return self._stored.users

    @property
    def acls(self) -> Mapping[str, AclInfo]:
        """The policies of each subject, read-only. Every change replaces the mapping."""
        return self._stored.acls

    def add(self, user: UserInfo) -> None:
        """Create the first user of the configuration, unless the user exists."""
        if user.username and user.username not in self.users:
            self._save(self._stored.users | {user.username: user}, self._stored.acls)

    def create_user(self, name: str, user: UserInfo, asker: str = "") -> None:
        """Create a user, by default with ``Normal`` and ``enable``. Raises PeerRefused: no secret, or the user exists.
        In all methods ``asker`` is the user that signed the request: only super users can change super users."""
        self._refuse_super(user.user_type, asker, "create", ResponseCode.SYSTEM_ERROR)
        self._refuse(not user.password, "password can not be blank")
        self._refuse(name in self.users, "The user is existed")
        made = UserInfo(
            username=name,
            password=user.password,
            user_type=_known(user.user_type, _USER_TYPES) or "Normal",
            user_status=_known(user.user_status, _USER_STATES) or "enable",
        )
        self._save(self._stored.users | {name: made}, self._stored.acls)

    def update_user(self, name: str, user: UserInfo, asker: str = "") -> None:
        """Change the fields of a user that are set in ``user``. Raises PeerRefused: the user does not exist."""
        self._refuse_super(user.user_type, asker, "update", ResponseCode.SYSTEM_ERROR)
        former = self.users.get(name)
        self._refuse(former is None, "The user is not exist")
        assert former is not None, "the user exists"
        # Check the old type, too: a normal user can neither create nor change a super user.
        self._refuse_super(former.user_type, asker, "update")
        changed = UserInfo(
            username=name,
            password=user.password or former.password,
            user_type=_known(user.user_type, _USER_TYPES) or former.user_type,
            user_status=_known(user.user_status, _USER_STATES) or former.user_status,
        )
        self._save(self._stored.users | {name: changed}, self._stored.acls)

    def delete_user(self, name: str, asker: str = "") -> None:
        """Remove a user, if it exists, with its policies. Raises PeerRefused: no name."""
        self._refuse(not name, "username can not be blank")
        if name in self.users:
            self._refuse_super(self.users[name].user_type, asker, "update")
            subject = f"{_USER}:{name}"
            # Remove the policies, too: otherwise a later user with the same name would have them.
            users = {key: user for key, user in self.users.items() if key != name}
            self._save(users, {key: acl for key, acl in self._stored.acls.items() if key != subject})

    def users_like(self, part: str) -> list[UserInfo]:
        """Return the users with a name that contains a text, in the order of their names."""
        return [user for name, user in sorted(self.users.items()) if part in name]

    def put_acl(self, subject: str, policies: Sequence[AclPolicy]) -> None:
        """Create or change policies. An entry replaces the former entry for the same resource.
        Raises PeerRefused: an unknown subject, an entry without resource, action or decision, an entry with an invalid
        network, and too many entries or networks."""
        key = self._subject(subject, f"The subject of {subject} is not exist.", policies)
        former = self._stored.acls.get(key, AclInfo())
        entries = [entry for policy in policies for entry in policy.entries]
        self._refuse_many(len(entries), _ENTRIES_MAX, "entries in one request")
        networks = sum(len(entry.source_ips or ()) for entry in entries)
        self._refuse_many(networks, _NETWORKS_MAX, "source ips in one request")
        merged = {policy.policy_type: {entry.resource: entry for entry in policy.entries} for policy in former.policies}
        for policy in policies:
            policy_type = _known(policy.policy_type, _POLICY_TYPES) or _POLICY_TYPES[0]
            # Check all entries before the save: an invalid entry refuses the whole request.
            self._refuse(not policy.entries, "The policies is empty.")
            merged.setdefault(policy_type, {}).update((entry.resource, entry) for entry in self._entries(policy))
        self._refuse_many(sum(map(len, merged.values())), _ENTRIES_OF_SUBJECT_MAX, f"entries of {key}")
        self._set_acl(key, merged)

    def delete_acl(self, subject: str, policy_type: str | None, resource: str | None) -> None:
        """Remove the entry for a resource from a policy, by default from ``Custom``. Without a resource, remove all
        policies of the subject. Raises PeerRefused: an unknown subject, nothing to remove, or an invalid resource. (The
        reference removes all policies for an invalid resource.)"""
        key = self._subject(subject, "The subject is not exist.")
        acl = self._stored.acls.get(key)
        self._refuse(acl is None, "The acl is not exist.")
        assert acl is not None, "the subject has policies"
        if resource is None:
            self._set_acl(key, {})
            return
        name = _resource(resource)
        self._refuse(name is None, "The resource is null.")
        of_type = _known(policy_type, _POLICY_TYPES) or _POLICY_TYPES[0]
        kept = {
            policy.policy_type: {
                entry.resource: entry
                for entry in policy.entries
                if (policy.policy_type, entry.resource) != (of_type, name)
            }
            for policy in acl.policies
        }
        self._set_acl(key, kept)

    def acl(self, subject: str) -> AclInfo | None:
        """Return the policies of a subject, or None. Raises PeerRefused: an unknown subject."""
        return self._stored.acls.get(self._subject(subject, "The subject is not exist."))

    def acls_like(self, subject_part: str, resource_part: str) -> Iterator[AclInfo]:
        """Yield the policies of each subject that contains ``subject_part``. Include only entries with resources that
        contain ``resource_part``."""
        for subject, acl in sorted(self._stored.acls.items()):
            policies = [
                AclPolicy(policy_type=policy.policy_type, entries=entries)
                for policy in acl.policies
                if (entries := [entry for entry in policy.entries if resource_part in entry.resource])
            ]
            if policies and subject_part in subject:
                yield AclInfo(subject=subject, policies=policies)

    # -- inside

    def _refuse_super(
        self, user_type: str | None, asker: str, verb: str, code: int = ResponseCode.NO_PERMISSION
    ) -> None:
        # Allow requests without a user: either a broker signed them, or signatures are not required.
        is_normal = asker in self.users and self.users[asker].user_type != SUPER
        if is_normal and _known(user_type, _USER_TYPES) == SUPER:
            raise PeerRefused(code, f"The super user can only be {verb} by super user", self._address)

    def _refuse_many(self, count: int, limit: int, what: str) -> None:
        if count > limit:
            raise PeerRefused(ResponseCode.SYSTEM_ERROR, f"{count} {what}: at most {limit} are kept", self._address)

    def _subject(self, subject: str, unknown: str, policies: Sequence[AclPolicy] | None = None) -> str:
        """Return the key of a subject. Raises PeerRefused: its user does not exist."""
        kind, colon, name = subject.partition(":")
        is_subject = bool(colon) and kind.lower() == _USER.lower()
        if policies is not None and not is_subject:
            raise PeerRefused(
                ResponseCode.SYSTEM_ERROR, "An system error occurred, please try again later.", self._address
            )
        self._refuse(not is_subject, "The subject is null.")
        if policies is None or any(policy.entries for policy in policies):
            self._refuse(name not in self.users, unknown)
        return f"{_USER}:{name}"

    def _entries(self, policy: AclPolicy) -> Iterator[AclEntry]:
        for entry in policy.entries:
            resource = _resource(entry.resource)
            self._refuse(resource is None, "The resource is null.")
            actions = [action for text in entry.actions if (action := _known(text, _ACTIONS))]
            self._refuse(not actions, "The actions is empty.")
            self._refuse("Any" in actions, "The actions can not be Any.")
            self._refuse(not all(map(_is_network, entry.source_ips or ())), "The source ip is invalid.")
            decision = _known(entry.decision, _DECISIONS)
            self._refuse(decision is None, "The decision is null or illegal.")
            assert resource is not None, "the resource is valid"
            yield AclEntry(resource=resource, actions=actions, source_ips=entry.source_ips or None, decision=decision)

    def _refuse(self, is_wrong: bool, remark: str) -> None:
        if is_wrong:
            raise PeerRefused(ResponseCode.NO_PERMISSION, remark, self._address)

    def _set_acl(self, subject: str, policies: Mapping[str | None, Mapping[str, AclEntry]]) -> None:
        acl = AclInfo(
            subject=subject,
            policies=[
                AclPolicy(policy_type=policy_type, entries=list(entries.values()))
                for policy_type, entries in policies.items()
                if entries
            ],
        )
        # Replace the tables instead of changing them: `Authorization` caches by identity, and sees either the old
        # tables or the new tables.
        assert subject.startswith(f"{_USER}:"), f"the subject {subject} is a user"
        others = {key: value for key, value in self._stored.acls.items() if key != subject}
        self._save(self._stored.users, others | ({subject: acl} if acl.policies else {}))

    def _save(self, users: dict[str, UserInfo], acls: dict[str, AclInfo]) -> None:
        stored = _Stored(users, acls)
        # Save first: a right that a crash can lose must not have an effect.
        self._file.save(msgspec.to_builtins(stored))
        self._stored = stored


def _known(text: str | None, names: Sequence[str]) -> str | None:
    """Return the name that is equal to a text, regardless of case; None if there is no such name."""
    return next((name for name in names if name.lower() == (text or "").lower()), None)


def _resource(text: str | None) -> str | None:
    """Return a resource in its stored form: ``Topic:orders``, ``Group:a*`` or ``*``; None if it is invalid."""
    if not text:
        return None
    kind, colon, name = text.partition(":")
    known = _known(kind, _RESOURCE_TYPES)
    if text == "*" or known == "Any":
        return "*"
    # Cut a prefix at its first star: "a*b*" means "a*".
    name = name.partition("*")[0] + "*" if name.endswith("*") else name
    return f"{known}:{name}" if known and colon else None


def _is_network(text: str) -> bool:
    try:
        ipaddress.ip_network(text, strict=False)
    except ValueError:
        return False
    return True


T = TypeVar("T")


class AccessContext(Protocol):
    """The parts of the broker that requests about users and policies use."""

    access: AccessTable
    identity: OwnAddress
    settings: BrokerSettings


class AccessHandlers(Handlers[AccessContext]):
    """The handlers of requests about users and policies."""

    def __init__(self, context: AccessContext) -> None:
        super().__init__(context)
        self._access = context.access

    @answers(RequestCode.AUTH_CREATE_USER, admins_only=True)
    def create_user(self, connection: Connection, command: Command) -> Command:
        self._access.create_user(self._username(command), self._body(command, UserInfo), _asker(command))
        return reply(command)

    @answers(RequestCode.AUTH_UPDATE_USER, admins_only=True)
    def update_user(self, connection: Connection, command: Command) -> Command:
        self._access.update_user(self._username(command), self._body(command, UserInfo), _asker(command))
        return reply(command)

    @answers(RequestCode.AUTH_DELETE_USER, admins_only=True)
    def delete_user(self, connection: Connection, command: Command) -> Command:
        self._access.delete_user(decode_fields(command).get("username", ""), _asker(command))
        return reply(command)

    @answers(RequestCode.AUTH_GET_USER, admins_only=True)
    def user(self, connection: Connection, command: Command) -> Command:
        """Return a user. The body is empty if the user does not exist."""
        found = self._access.users.get(self._username(command))
        return reply(command, body=b"" if found is None else msgspec.json.encode(found))

    @answers(RequestCode.AUTH_LIST_USER, admins_only=True)
    def users(self, connection: Connection, command: Command) -> Command:
        part = decode_header_leniently(command, ListUsersRequest).filter or ""
        return reply(command, body=_list(self._access.users_like(part)))

    @answers(RequestCode.AUTH_CREATE_ACL, admins_only=True)
    @answers(RequestCode.AUTH_UPDATE_ACL, admins_only=True)
    def put_acl(self, connection: Connection, command: Command) -> Command:
        """Create or change entries of a subject. The subject's entries for other resources stay."""
        acl = self._body(command, AclInfo)
        if not acl.policies:
            raise self._refused(ResponseCode.SYSTEM_ERROR, "The body of acl is null")
        self._access.put_acl(decode_fields(command).get("subject", ""), acl.policies)
        return reply(command)

    @answers(RequestCode.AUTH_DELETE_ACL, admins_only=True)
    def delete_acl(self, connection: Connection, command: Command) -> Command:
        header = decode_header_leniently(command, DeleteAclRequest, missing={"subject": ""})
        self._access.delete_acl(header.subject, header.policy_type, header.resource or None)
        return reply(command)

    @answers(RequestCode.AUTH_GET_ACL)
    def acl(self, connection: Connection, command: Command) -> Command:
        """Return the policies of a subject. The body is empty if the subject has no policies."""
        found = self._access.acl(decode_fields(command).get("subject", ""))
        return reply(command, body=b"" if found is None else msgspec.json.encode(found))

    @answers(RequestCode.AUTH_LIST_ACL)
    def acls(self, connection: Connection, command: Command) -> Command:
        header = decode_header_leniently(command, ListAclsRequest)
        found = list(self._access.acls_like(header.subject_filter or "", header.resource_filter or ""))
        return reply(command, body=_list(found))

    def _username(self, command: Command) -> str:
        name = decode_fields(command).get("username")
        if not name:
            raise self._refused(ResponseCode.INVALID_PARAMETER, "The username is blank")
        return name

    def _body(self, command: Command, body_type: type[T]) -> T:
        if not command.payload:
            raise self._refused(ResponseCode.SYSTEM_ERROR, f"{request_name(command.code)} needs a body")
        return decode_body(command, body_type)

    def _refused(self, code: ResponseCode, remark: str) -> PeerRefused:
        return PeerRefused(code, remark, self._context.identity.ip)


def _asker(command: Command) -> str:
    """Return the user that signed a request, or "" for an unsigned request."""
    return decode_fields(command).get(ACCESS_KEY, "")


def _list(values: Sequence[object]) -> bytes:
    """Return a JSON array. Like the reference, return an empty text instead of an empty array."""
    return msgspec.json.encode(values) if values else b""

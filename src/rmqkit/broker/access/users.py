"""Users and what they may do (``LocalAuthenticationMetadataProvider``, ``LocalAuthorizationMetadataProvider``), kept in
``config/access.json``, which its owner alone may read: it holds the users' secrets.

The reference keeps both in RocksDB databases; this file is our own. A change is on the disk before it is answered.
Who is refused for policies: `rmqkit.broker.access.policies`. Loop only. Source: behaviour.md §9.8; remoting.md §4.4.1,
§6.4.14.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct, field

from rmqkit.errors import PeerRefused
from rmqkit.protocol.codes import ResponseCode
from rmqkit.protocol.schemas.access import AclEntry, AclInfo, AclPolicy, UserInfo
from rmqkit.store.json_files import JsonFile

__all__ = ["SUPER", "AccessTable"]

SUPER = "Super"
"""The type of users who may do everything."""

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
    """Users by name, and the policies of each subject, ``User:<name>``. What cannot be done raises PeerRefused with the
    reference's code and remark. ``address``: of this broker, for these refusals."""

    def __init__(self, folder: Path, address: str) -> None:
        self._file = JsonFile(folder / "access.json", mode=_OWNER_ALONE)
        self._address = address
        self._stored = _Stored()

    def load(self) -> None:
        self._stored = self._file.load(_Stored) or _Stored()

    @property
    def users(self) -> Mapping[str, UserInfo]:
        """All users with their secrets, to be read only; another mapping after every change."""
        return self._stored.users

    @property
    def acls(self) -> Mapping[str, AclInfo]:
        """The policies of each subject, to be read only; another mapping after every change."""
        return self._stored.acls

    def add(self, user: UserInfo) -> None:
        """Create the configuration's first user; one that is there stays as operators made it."""
        if user.username and user.username not in self.users:
            self._save(self._stored.users | {user.username: user}, self._stored.acls)

    def create_user(self, name: str, user: UserInfo, asker: str = "") -> None:
        """Create a user, who is ``Normal`` and ``enable`` unless told otherwise. Refused: no secret, or it exists.
        Here and below ``asker`` is who signed the request: only super users look after super users."""
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
        """Change what is given of a user. Refused: there is none."""
        self._refuse_super(user.user_type, asker, "update", ResponseCode.SYSTEM_ERROR)
        former = self.users.get(name)
        self._refuse(former is None, "The user is not exist")
        assert former is not None, "just looked at"
        self._refuse_super(former.user_type, asker, "update")
        changed = UserInfo(
            username=name,
            password=user.password or former.password,
            user_type=_known(user.user_type, _USER_TYPES) or former.user_type,
            user_status=_known(user.user_status, _USER_STATES) or former.user_status,
        )
        self._save(self._stored.users | {name: changed}, self._stored.acls)

    def delete_user(self, name: str, asker: str = "") -> None:
        """Forget a user and its policies; an unknown one is fine. Refused: no name."""
        self._refuse(not name, "username can not be blank")
        if name in self.users:
            self._refuse_super(self.users[name].user_type, asker, "update")
            subject = f"{_USER}:{name}"
            users = {key: user for key, user in self.users.items() if key != name}
            self._save(users, {key: acl for key, acl in self._stored.acls.items() if key != subject})

    def users_like(self, part: str) -> list[UserInfo]:
        """Users whose name has a part, in the order of their names."""
        return [user for name, user in sorted(self.users.items()) if part in name]

    def put_acl(self, subject: str, policies: Sequence[AclPolicy]) -> None:
        """Create or change policies: an entry about a resource replaces the former one about it.
        Refused: an unknown subject, an entry without resource, action or decision, or with an unreadable network, and
        more entries or networks than the loop has time for."""
        key = self._subject(subject, f"The subject of {subject} is not exist.", policies)
        former = self._stored.acls.get(key, AclInfo())
        entries = [entry for policy in policies for entry in policy.entries]
        self._refuse_many(len(entries), _ENTRIES_MAX, "entries in one request")
        networks = sum(len(entry.source_ips or ()) for entry in entries)
        self._refuse_many(networks, _NETWORKS_MAX, "source ips in one request")
        merged = {policy.policy_type: {entry.resource: entry for entry in policy.entries} for policy in former.policies}
        for policy in policies:
            policy_type = _known(policy.policy_type, _POLICY_TYPES) or _POLICY_TYPES[0]
            self._refuse(not policy.entries, "The policies is empty.")
            merged.setdefault(policy_type, {}).update((entry.resource, entry) for entry in self._entries(policy))
        self._refuse_many(sum(map(len, merged.values())), _ENTRIES_OF_SUBJECT_MAX, f"entries of {key}")
        self._set_acl(key, merged)

    def delete_acl(self, subject: str, policy_type: str | None, resource: str | None) -> None:
        """Forget what one policy (``Custom`` unless told) says of a resource; without a resource, all of a subject.
        Refused: an unknown subject, nothing to forget, or a resource that is none: the reference forgets all then."""
        key = self._subject(subject, "The subject is not exist.")
        acl = self._stored.acls.get(key)
        self._refuse(acl is None, "The acl is not exist.")
        assert acl is not None, "just looked at"
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
        """The policies of a subject, None without any. Refused: an unknown subject."""
        return self._stored.acls.get(self._subject(subject, "The subject is not exist."))

    def acls_like(self, subject_part: str, resource_part: str) -> Iterator[AclInfo]:
        """What subjects with a part in their name may do with resources that have another in theirs."""
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
        is_normal = asker in self.users and self.users[asker].user_type != SUPER
        if is_normal and _known(user_type, _USER_TYPES) == SUPER:
            raise PeerRefused(code, f"The super user can only be {verb} by super user", self._address)

    def _refuse_many(self, count: int, limit: int, what: str) -> None:
        if count > limit:
            raise PeerRefused(ResponseCode.SYSTEM_ERROR, f"{count} {what}: at most {limit} are kept", self._address)

    def _subject(self, subject: str, unknown: str, policies: Sequence[AclPolicy] | None = None) -> str:
        """The key of a subject whose user exists."""
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
            assert resource is not None, "just looked at"
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
        others = {key: value for key, value in self._stored.acls.items() if key != subject}
        self._save(self._stored.users, others | ({subject: acl} if acl.policies else {}))

    def _save(self, users: dict[str, UserInfo], acls: dict[str, AclInfo]) -> None:
        stored = _Stored(users, acls)
        self._file.save(msgspec.to_builtins(stored))
        self._stored = stored


def _known(text: str | None, names: Sequence[str]) -> str | None:
    """The name that a text is, in whatever case."""
    return next((name for name in names if name.lower() == (text or "").lower()), None)


def _resource(text: str | None) -> str | None:
    """``Topic:orders``, ``Group:a*`` or ``*`` as it is kept; None when it is none."""
    if not text:
        return None
    kind, colon, name = text.partition(":")
    known = _known(kind, _RESOURCE_TYPES)
    if text == "*" or known == "Any":
        return "*"
    name = name.partition("*")[0] + "*" if name.endswith("*") else name
    return f"{known}:{name}" if known and colon else None


def _is_network(text: str) -> bool:
    try:
        ipaddress.ip_network(text, strict=False)
    except ValueError:
        return False
    return True

"""The pages of users and policies of ACL 2.0: the list, the test of a permission, and the changes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from msgspec import Struct

from rmqkit.admin.cluster.access import ACTIONS, UserRow, may, subject_of
from rmqkit.console.access.confirmations import Review, Right
from rmqkit.console.html.render import shell
from rmqkit.console.request.forms import Field, Form, change, chosen_brokers, where
from rmqkit.console.request.request import Ask, Page, Part, part
from rmqkit.errors import UnknownName
from rmqkit.protocol.schemas.access import AclInfo
from rmqkit.sentences import _

_TYPES, _STATES, _DECISIONS = ("Normal", "Super"), ("enable", "disable"), ("Allow", "Deny")


class UserState(Struct, rename="camel", kw_only=True):
    """A user, with the brokers that have this user. ``differs``: True if a broker does not have the user, or if the
    type or the status of the user is not the same at all brokers."""

    username: str
    user_type: str
    user_status: str
    brokers: list[str]
    differs: bool


class PolicyRow(Struct, rename="camel", kw_only=True):
    """A user's policy for a resource, and the brokers that have this policy."""

    username: str
    resource: str
    actions: str
    networks: str
    decision: str
    policy_type: str
    brokers: list[str]


async def access(ask: Ask) -> Page:
    """Show users and policies. With ``user``, ``resource``, ``action`` and ``ip``, also test a permission."""
    found, acls = await part(ask.admin.access.users()), await part(ask.admin.access.policies())
    names = _brokers(found, acls)
    users: list[UserRow] = found.value or []
    question = {name: ask.text(name) for name in ("user", "resource", "action", "ip")}
    values = {
        "users": _users(users, names),
        "usersTrouble": found.trouble,
        "policies": _policies(acls.value or {}),
        "policiesTrouble": acls.trouble,
        "brokers": names,
        "question": question,
        "verdicts": _verdicts(question, users, acls.value or {}) if all(question.values()) else {},
    }
    more = {"actions": ACTIONS, "mayChange": ask.may(Right.ADMINISTER)}
    return Page("access.html", _("Access"), values, more, command="rmq policy list")


def _brokers(users: Part, acls: Part) -> list[str]:
    return sorted({row.broker_name for row in users.value or ()} | set(acls.value or ()))


def _users(rows: list[UserRow], brokers: list[str]) -> list[UserState]:
    by_name: dict[str, list[UserRow]] = {}
    for row in rows:
        by_name.setdefault(row.username, []).append(row)
    return [
        UserState(
            username=name,
            user_type=found[0].user_type,
            user_status=found[0].user_status,
            brokers=[row.broker_name for row in found],
            differs=len(found) < len(brokers) or len({(row.user_type, row.user_status) for row in found}) > 1,
        )
        for name, found in sorted(by_name.items())
    ]


def _policies(acls: dict[str, list[AclInfo]]) -> list[PolicyRow]:
    rows: dict[tuple[str, ...], list[str]] = {}
    for broker, found in acls.items():
        for acl in found:
            for policy in acl.policies:
                for entry in policy.entries:
                    networks = ", ".join(entry.source_ips or ()) or "anywhere"
                    user, kind = (acl.subject or "").removeprefix("User:"), policy.policy_type or "Custom"
                    said = (user, entry.resource, ", ".join(entry.actions), networks, entry.decision or "", kind)
                    rows.setdefault(said, []).append(broker)
    names = ("username", "resource", "actions", "networks", "decision", "policy_type")
    return [PolicyRow(**dict(zip(names, said, strict=True)), brokers=at) for said, at in sorted(rows.items())]


def _verdicts(asked: dict[str, str], users: list[UserRow], acls: dict[str, list[AclInfo]]) -> dict[str, str]:
    """Return the reason why each broker would refuse the action, or "" if the user has the permission."""
    known = {row.broker_name: row for row in users if row.username == asked["user"]}
    found = {}
    for broker in sorted({row.broker_name for row in users}):
        row = known.get(broker)
        acl = next((one for one in acls.get(broker, ()) if one.subject == subject_of(asked["user"])), None)
        if row is None:
            found[broker] = _("User:{asked} is not found.", asked=asked["user"])
        elif row.user_status == "disable":
            found[broker] = _("User:{asked} is disabled.", asked=asked["user"])
        else:
            found[broker] = may(asked["user"], row.user_type, acl, asked["resource"], asked["action"], asked["ip"])
    return found


# -- changes


async def new_user(ask: Ask) -> Page:
    """Create a user."""
    fields = [
        Field(name="name", label=_("Name (access key)"), hint=_("name that the user logs in and signs with")),
        Field(
            name="secret",
            label=_("Secret key"),
            kind="password",
            hint=_("at least 8 characters; it is not shown again"),
        ),
        Field(
            name="type",
            label=_("Type"),
            kind="choice",
            value="Normal",
            choices=_TYPES,
            hint=_("Super may do everything"),
        ),
        where(ask, hint=_("each broker keeps its own users")),
    ]
    user = ask.form.get("name", "").strip()

    async def run(given: dict[str, str], broker: str) -> list[Any]:
        return list(await ask.admin.access.create_user(given["name"], given["secret"], given["type"], broker))

    def check(given: dict[str, str]) -> list[tuple[str, str]]:
        if not given["name"] or len(given["secret"]) < 8:
            raise ValueError(_("give a name, and a secret key of at least 8 characters"))
        if given["type"] not in _TYPES:
            raise ValueError(_("type {given} must be {types}", given=given["type"], types=" or ".join(_TYPES)))
        return [(_("User"), given["name"]), (_("Type"), given["type"]), (_("Secret key"), _("as you entered it"))]

    return await _change(
        ask, _("New user"), _("create user"), user, fields, check, run, "AUTH_CREATE_USER (3001)",
        "rmq user create USER",
    )  # fmt: skip


async def edit_user(ask: Ask) -> Page:
    """Change a user's secret key, type or status."""
    user, row = await _known(ask)
    fields = [
        Field(name="secret", label=_("New secret key"), kind="password", hint=_("empty: it stays as it is")),
        Field(name="type", label=_("Type"), kind="choice", value=row.user_type, choices=_TYPES),
        Field(name="status", label=_("Status"), kind="choice", value=row.user_status, choices=_STATES),
        where(ask),
    ]

    async def run(given: dict[str, str], broker: str) -> list[Any]:
        return list(
            await ask.admin.access.update_user(
                user, secret=given["secret"], user_type=given["type"], status=given["status"], broker=broker
            )
        )

    def check(given: dict[str, str]) -> list[tuple[str, str]]:
        if given["type"] not in _TYPES or given["status"] not in _STATES:
            why = _("type must be {types}, status {states}", types=" or ".join(_TYPES), states=" or ".join(_STATES))
            raise ValueError(why)
        return [
            (_("User"), user),
            (_("Type"), f"{row.user_type} → {given['type']}"),
            (_("Status"), f"{row.user_status} → {given['status']}"),
            (_("Secret key"), _("a new one") if given["secret"] else _("as it is")),
        ]

    return await _change(
        ask, _("Edit {user}", user=user), _("edit user"), user, fields, check, run, "AUTH_UPDATE_USER (3002)",
        shell("rmq user update", user),
    )  # fmt: skip


async def delete_user(ask: Ask) -> Page:
    """Delete a user."""
    user, __ = await _known(ask)

    async def run(given: dict[str, str], broker: str) -> list[Any]:
        return list(await ask.admin.access.delete_user(user, broker))

    return await _change(
        ask, _("Delete {user}", user=user), _("delete user"), user, [where(ask)],
        lambda given: [(_("User"), user)], run,
        "AUTH_DELETE_USER (3003)", shell("rmq user delete", user), typed=user,
        warning=_("requests that it signs are refused from then on, also those of programs that run"),
    )  # fmt: skip


async def put_policy(ask: Ask) -> Page:
    """Set a user's policy for a resource."""
    user, __ = await _known(ask)
    fields = [
        Field(
            name="resource", label=_("Resource"), value=ask.text("resource"), hint=_("Topic:Orders, Group:bill*, or *")
        ),
        Field(name="actions", label=_("Actions"), kind="many", choices=ACTIONS),
        Field(name="decision", label=_("Decision"), kind="choice", value="Allow", choices=_DECISIONS),
        Field(
            name="networks",
            label=_("Only from"),
            hint=_("networks, such as 10.0.0.0/8, 192.0.2.7; empty: from anywhere"),
        ),
        where(ask),
    ]

    def check(given: dict[str, str]) -> list[tuple[str, str]]:
        if not given["resource"] or not given["actions"] or given["decision"] not in _DECISIONS:
            raise ValueError(_("give a resource, at least one action, and Allow or Deny"))
        said = _(
            "{given} {actions} on {resource}",
            given=given["decision"],
            actions=", ".join(given["actions"].split()),
            resource=given["resource"],
        )
        return [(_("User"), user), (_("Policy"), said), (_("From"), given["networks"] or "anywhere")]

    async def run(given: dict[str, str], broker: str) -> list[Any]:
        networks = [one.strip() for one in given["networks"].split(",") if one.strip()]
        done = await ask.admin.access.put_policy(
            user, given["resource"], given["actions"].split(), decision=given["decision"], networks=networks,
            broker=broker,
        )  # fmt: skip
        return list(done)

    return await _change(
        ask, _("Policy of {user}", user=user), _("put policy"), user, fields, check, run,
        _("AUTH_CREATE_ACL (3006) or AUTH_UPDATE_ACL (3007)"),
        shell("rmq policy put", user, "-r", "RESOURCE", "-a", "ACTIONS"),
    )  # fmt: skip


async def delete_policy(ask: Ask) -> Page:
    """Delete a user's policy for a resource."""
    user, __ = await _known(ask)
    resource = ask.text("resource")

    async def run(given: dict[str, str], broker: str) -> list[Any]:
        return list(await ask.admin.access.delete_policy(user, resource, broker))

    return await _change(
        ask, _("Delete a policy of {user}", user=user), _("delete policy"), user, [where(ask)],
        lambda given: [(_("User"), user), (_("Resource"), resource or _("every one"))], run, "AUTH_DELETE_ACL (3008)",
        shell("rmq policy delete", user, *(("-r", resource) if resource else ())), typed=user,
    )  # fmt: skip


async def _known(ask: Ask) -> tuple[str, UserRow]:
    """Return the user in the address. Raises UnknownName: no broker knows the user."""
    user = ask.params["u"]
    rows = await ask.admin.access.users(user)
    for row in rows:
        if row.username == user:
            return user, row
    raise UnknownName("user", user, _("the brokers"), sorted({row.username for row in await ask.admin.access.users()}))


async def _state_of_user(ask: Ask, user: str) -> dict[str, str]:
    """Return the state of a user at all brokers, as names and texts to compare."""
    rows = [row for row in await ask.admin.access.users(user) if row.username == user]
    found = {_("user at {broker}", broker=row.broker_name): f"{row.user_type}, {row.user_status}" for row in rows}
    for row in _policies(await ask.admin.access.policies(user)):
        if row.username == user:
            said = _(
                "{decision} {actions} from {networks}",
                decision=_(row.decision),
                actions=row.actions,
                networks=row.networks,
            )
            found |= {
                _("{kind} {resource} at {broker}", kind=row.policy_type, resource=row.resource, broker=broker): said
                for broker in row.brokers
            }
    return found


async def _change(
    ask: Ask,
    title: str,
    action: str,
    user: str,
    fields: list[Field],
    check: Callable[[dict[str, str]], list[tuple[str, str]]],
    run: Callable[[dict[str, str], str], Awaitable[list[Any]]],
    request: str,
    command: str,
    *,
    typed: str = "",
    warning: str = "",
) -> Page:
    """Return the form or the review of a change that is sent to one broker after the other."""
    back = ask.link("access")
    form = Form(
        title=title, action=action, target=user, fields=fields, back=back, warning=warning, command=command,
        crumbs=[(_("Access"), back)],
    )  # fmt: skip

    async def plan(given: dict[str, str]) -> Review:
        rows, brokers = check(given), chosen_brokers(ask, given)
        return Review(
            rows=[*rows, (_("Brokers"), ", ".join(brokers))],
            requests=[_("{request} to {broker}", request=request, broker=one) for one in brokers],
            typed=typed,
            run=lambda: _at_each(brokers, lambda broker: run(given, broker)),
            look=lambda: _state_of_user(ask, user), seen=await _state_of_user(ask, user),
        )  # fmt: skip

    return await change(ask, form, plan)


async def _at_each(brokers: list[str], doing: Callable[[str], Awaitable[list[Any]]]) -> list[Any]:
    return [done for broker in brokers for done in await doing(broker)]

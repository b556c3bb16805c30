"""``rmq user``, ``rmq policy``: users of ACL 2.0, and their permissions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from rmqkit.admin.cluster.access import ACTIONS, UserRow, may, subject_of
from rmqkit.cli.frame.nouns import Broker, Named, Noun, View, Yes, confirm
from rmqkit.errors import UnknownName

if TYPE_CHECKING:
    from rmqkit.admin import Admin
    from rmqkit.admin.calls import Done


USER = Noun("user", "Users of ACL 2.0: list, create, change and delete them. Each broker keeps its own users.")
POLICY = Noun("policy", "Policies of ACL 2.0: what users may do with topics and groups.")

_SECRET = "RMQ_USER_SECRET"
User = Annotated[str, Named("-u", "--username", help="User name.")]
Filter = Annotated[str, typer.Option("-f", "--filter", help="Only names that contain this text.", show_default=False)]
Secret = Annotated[
    str,
    typer.Option("-p", "--password", help="Secret key of the user.", envvar=_SECRET, show_default=False),
]
Resource = Annotated[str, typer.Option("-r", "--resource", help="Topic:Orders, Group:bill*, Cluster:* or *.")]


def _subject(text: str) -> str:
    """Return a user's name, also from mqadmin's form ``User:anna``."""
    return text.removeprefix("User:")


@USER.verb("list")
async def list_users(admin: Admin, part: Filter = "", broker: Broker = None) -> list[UserRow]:
    """List the users of each broker. Secrets are not shown."""
    return await admin.access.users(part, broker)


@USER.verb("create")
async def create_user(
    admin: Admin,
    user: User,
    secret: Secret = "",
    user_type: Annotated[str, typer.Option("-t", "--type", help="Normal or Super.")] = "Normal",
    broker: Broker = None,
) -> list[Done]:
    """Create a user on every broker, or on one."""
    return await admin.access.create_user(user, _given(secret), user_type, broker)


@USER.verb("update")
async def update_user(
    admin: Admin,
    user: User,
    secret: Secret = "",
    user_type: Annotated[str, typer.Option("-t", "--type", help="Normal or Super.", show_default=False)] = "",
    status: Annotated[str, typer.Option("-s", "--status", help="enable or disable.", show_default=False)] = "",
    broker: Broker = None,
) -> list[Done]:
    """Change the secret key, type or status of a user. Options that you leave out keep their values."""
    return await admin.access.update_user(user, secret=secret, user_type=user_type, status=status, broker=broker)


@USER.verb("delete")
async def delete_user(admin: Admin, user: User, broker: Broker = None, yes: Yes = False) -> list[Done]:
    """Delete a user. On a terminal, it asks for confirmation."""
    confirm(f"delete user {user}", yes=yes)
    return await admin.access.delete_user(user, broker)


def _given(secret: str) -> str:
    if not secret:
        raise typer.BadParameter(f"give the secret key with -p, or in {_SECRET}")
    return secret


@POLICY.verb("list")
async def list_policies(
    admin: Admin, user: Annotated[str, Named("-s", "--subject", help="User name.")] = "", broker: Broker = None
) -> View:
    """List what users may do, on each broker."""
    found = await admin.access.policies(_subject(user), broker)
    rows = [
        {
            "broker": name,
            "user": (acl.subject or "").removeprefix("User:"),
            "resource": entry.resource,
            "actions": ",".join(entry.actions),
            "from": ",".join(entry.source_ips or ()) or "anywhere",
            "decision": entry.decision or "",
        }
        for name, acls in found.items()
        for acl in acls
        for policy in acl.policies
        for entry in policy.entries
    ]
    return View(found, [rows or "there are no policies"])


@POLICY.verb("put")
async def put_policy(
    admin: Admin,
    user: Annotated[str, Named("-s", "--subject", help="User name.")],
    resource: Resource,
    actions: Annotated[str, typer.Option("-a", "--actions", help=f"Some of {','.join(ACTIONS)}.")],
    decision: Annotated[str, typer.Option("-d", "--decision", help="Allow or Deny.")] = "Allow",
    networks: Annotated[
        str, typer.Option("-i", "--source-ip", help="Only from these networks: 10.0.0.0/8,…", show_default=False)
    ] = "",
    broker: Broker = None,
) -> list[Done]:
    """Set what a user may do with a resource. This replaces an earlier policy on the resource."""
    split = {"actions": actions.split(","), "networks": [one for one in networks.split(",") if one]}
    return await admin.access.put_policy(_subject(user), resource, decision=decision, broker=broker, **split)


@POLICY.verb("delete")
async def delete_policy(
    admin: Admin,
    user: Annotated[str, Named("-s", "--subject", help="User name.")],
    resource: Annotated[
        str, typer.Option("-r", "--resource", help="Only the policy on this resource.", show_default=False)
    ] = "",
    broker: Broker = None,
    yes: Yes = False,
) -> list[Done]:
    """Delete the policy on a resource, or all policies of a user. On a terminal, it asks for confirmation."""
    confirm(f"delete the policy of {user} on {resource or 'everything'}", yes=yes)
    return await admin.access.delete_policy(_subject(user), resource, broker)


@POLICY.verb("may")
async def may_user(
    admin: Admin,
    user: User,
    resource: Resource,
    action: Annotated[str, typer.Option("-a", "--action", help=f"One of {','.join(ACTIONS)}.")],
    ip: Annotated[str, typer.Option("-i", "--source-ip", help="Client address of the user.")],
    broker: Broker = None,
) -> list[dict[str, Any]]:
    """Show whether the policies of a user allow an action, on each broker."""
    users = {row.broker_name: row for row in await admin.access.users(user, broker) if row.username == user}
    if not users:
        raise UnknownName("user", user, "the brokers")
    found = await admin.access.policies(user, broker)
    rows = []
    for name, row in users.items():
        acl = next((one for one in found.get(name, ()) if one.subject == subject_of(user)), None)
        why = may(user, row.user_type, acl, resource, action, ip)
        rows.append({"brokerName": name, "may": "no" if why else "yes", "why": why})
    return rows

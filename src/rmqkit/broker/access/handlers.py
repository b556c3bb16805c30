"""Users and policies: codes 3001 to 3010 (``AdminBrokerProcessor``; `mqadmin createUser`, ``createAcl`` and the like).

Whoever may change the server may change them, and alone may read users: they are told with their secrets.
Source: remoting.md §4.4.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

import msgspec

from rmqkit.broker.access.users import AccessTable
from rmqkit.broker.handlers import Handlers, OwnAddress, answers
from rmqkit.broker.settings import BrokerSettings
from rmqkit.errors import PeerRefused
from rmqkit.protocol.acl import ACCESS_KEY
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import Command, decode_fields, decode_header_leniently, reply
from rmqkit.protocol.schemas.access import AclInfo, DeleteAclRequest, ListAclsRequest, ListUsersRequest, UserInfo
from rmqkit.remoting.connection import Connection
from rmqkit.remoting.router import decode_body

__all__ = ["AccessHandlers"]

T = TypeVar("T")


class AccessContext(Protocol):
    """What requests about users and policies may touch."""

    access: AccessTable
    identity: OwnAddress
    settings: BrokerSettings


class AccessHandlers(Handlers[AccessContext]):
    """Answers operators who look after users."""

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
        """One user; nothing for an unknown one."""
        found = self._access.users.get(self._username(command))
        return reply(command, body=b"" if found is None else msgspec.json.encode(found))

    @answers(RequestCode.AUTH_LIST_USER, admins_only=True)
    def users(self, connection: Connection, command: Command) -> Command:
        part = decode_header_leniently(command, ListUsersRequest).filter or ""
        return reply(command, body=_list(self._access.users_like(part)))

    @answers(RequestCode.AUTH_CREATE_ACL, admins_only=True)
    @answers(RequestCode.AUTH_UPDATE_ACL, admins_only=True)
    def put_acl(self, connection: Connection, command: Command) -> Command:
        """Create and change are one: what is there of a subject stays, but for the same resources."""
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
        """The policies of one subject; nothing when it has none."""
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
            raise self._refused(ResponseCode.SYSTEM_ERROR, f"request {command.code} needs a body")
        return decode_body(command, body_type)

    def _refused(self, code: ResponseCode, remark: str) -> PeerRefused:
        return PeerRefused(code, remark, self._context.identity.ip)


def _asker(command: Command) -> str:
    """Who signed a request; nobody has to, unless the broker asks for signatures."""
    return decode_fields(command).get(ACCESS_KEY, "")


def _list(values: Sequence[object]) -> bytes:
    """A JSON array; nothing in place of an empty one, as the reference answers."""
    return msgspec.json.encode(values) if values else b""

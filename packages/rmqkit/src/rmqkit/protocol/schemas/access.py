"""Users and policies of access control: requests 3001 to 3010 of auth, since 5.3.
Source: remoting.md §4.4.1, §6.4.14."""

from __future__ import annotations

from msgspec import Struct, field

from rmqkit.protocol.codes import RequestCode as Code
from rmqkit.protocol.operation import BROKER, Operation, Right


class UserRequest(Struct, gc=False):
    """AUTH_CREATE_USER, AUTH_UPDATE_USER, AUTH_DELETE_USER and AUTH_GET_USER."""

    username: str


class ListUsersRequest(Struct, gc=False):
    """AUTH_LIST_USER."""

    filter: str | None = None


class SubjectRequest(Struct, gc=False):
    """AUTH_CREATE_ACL, AUTH_UPDATE_ACL and AUTH_GET_ACL. A subject is ``User:<name>``."""

    subject: str


class DeleteAclRequest(Struct, rename="camel", gc=False):
    """AUTH_DELETE_ACL. Without type and resource, the broker deletes all policies of the subject."""

    subject: str
    policy_type: str | None = None
    resource: str | None = None


class ListAclsRequest(Struct, rename="camel", gc=False):
    """AUTH_LIST_ACL."""

    subject_filter: str | None = None
    resource_filter: str | None = None


class UserInfo(Struct, rename="camel", kw_only=True, omit_defaults=True):
    """A user. The type is ``Super`` or ``Normal``, the status is ``enable`` or ``disable``."""

    username: str | None = None
    password: str | None = None
    user_type: str | None = None
    user_status: str | None = None


class AclEntry(Struct, rename="camel", kw_only=True, omit_defaults=True):
    """The actions that a policy allows or denies on one resource (``Topic:orders``, ``Group:*``) from some networks."""

    resource: str
    actions: list[str] = field(default_factory=list)
    source_ips: list[str] | None = None
    decision: str | None = None


class AclPolicy(Struct, rename="camel", kw_only=True):
    """The entries of a policy type, ``Custom`` or ``Default``."""

    policy_type: str | None = None
    entries: list[AclEntry] = field(default_factory=list)


class AclInfo(Struct, rename="camel", kw_only=True):
    """All policies of a subject (``User:name``)."""

    subject: str | None = None
    policies: list[AclPolicy] = field(default_factory=list)


# fmt: off
OPERATIONS = (
    Operation(Code.AUTH_CREATE_USER, 2, BROKER, UserRequest, request_body=UserInfo, right=Right("Update")),
    Operation(Code.AUTH_UPDATE_USER, 2, BROKER, UserRequest, request_body=UserInfo, right=Right("Update")),
    Operation(Code.AUTH_DELETE_USER, 2, BROKER, UserRequest, right=Right("Update")),
    Operation(Code.AUTH_GET_USER, 2, BROKER, UserRequest, response_body=UserInfo, right=Right("Get"),
              is_reading=True),
    Operation(Code.AUTH_LIST_USER, 2, BROKER, ListUsersRequest, response_body=list[UserInfo], right=Right("Get"),
              is_reading=True),
    Operation(Code.AUTH_CREATE_ACL, 2, BROKER, SubjectRequest, request_body=AclInfo, right=Right("Update")),
    Operation(Code.AUTH_UPDATE_ACL, 2, BROKER, SubjectRequest, request_body=AclInfo, right=Right("Update")),
    Operation(Code.AUTH_DELETE_ACL, 2, BROKER, DeleteAclRequest, right=Right("Update")),
    Operation(Code.AUTH_GET_ACL, 2, BROKER, SubjectRequest, response_body=AclInfo, right=Right("Get"),
              is_reading=True),
    Operation(Code.AUTH_LIST_ACL, 2, BROKER, ListAclsRequest, response_body=list[AclInfo], right=Right("Get"),
              is_reading=True),
)
# fmt: on

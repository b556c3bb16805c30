"""Headers of access control: auth 3001–3010, from 5.3 on. Source: remoting.md §4.4.1."""

from __future__ import annotations

from msgspec import Struct


class UserRequest(Struct, gc=False):
    """AUTH_CREATE_USER, AUTH_UPDATE_USER, AUTH_DELETE_USER and AUTH_GET_USER."""

    username: str


class ListUsersRequest(Struct, gc=False):
    """AUTH_LIST_USER."""

    filter: str | None = None


class SubjectRequest(Struct, gc=False):
    """AUTH_CREATE_ACL, AUTH_UPDATE_ACL and AUTH_GET_ACL; a subject is ``User:<name>``."""

    subject: str


class DeleteAclRequest(Struct, rename="camel", gc=False):
    """AUTH_DELETE_ACL; without type and resource, everything of the subject."""

    subject: str
    policy_type: str | None = None
    resource: str | None = None


class ListAclsRequest(Struct, rename="camel", gc=False):
    """AUTH_LIST_ACL."""

    subject_filter: str | None = None
    resource_filter: str | None = None

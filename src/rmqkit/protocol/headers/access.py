"""Headers of access control: plain ACL 50–53 (4.4 to 5.2) and auth 3001–3010 (5.3 on). Source: remoting.md §4.4.1."""

from __future__ import annotations

from msgspec import Struct


class PlainAccessRequest(Struct, rename="camel", kw_only=True, gc=False):
    """UPDATE_AND_CREATE_ACL_CONFIG; permissions are comma lists such as ``orders=PUB|SUB``."""

    access_key: str
    secret_key: str | None = None
    white_remote_address: str | None = None
    admin: bool = False
    default_topic_perm: str | None = None
    default_group_perm: str | None = None
    topic_perms: str | None = None
    group_perms: str | None = None


class AccessKeyRequest(Struct, rename="camel", gc=False):
    """DELETE_ACL_CONFIG."""

    access_key: str


class AclVersionResponse(Struct, rename="camel", gc=False):
    """GET_BROKER_CLUSTER_ACL_INFO; both versions are JSON, of one DataVersion and of file path → DataVersion."""

    version: str | None = None
    all_acl_file_version: str | None = None
    broker_name: str | None = None
    broker_addr: str | None = None
    cluster_name: str | None = None


class WhiteAddressesRequest(Struct, rename="camel", gc=False):
    """UPDATE_GLOBAL_WHITE_ADDRS_CONFIG; addresses are separated by commas."""

    global_white_addrs: str
    acl_file_full_path: str | None = None


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

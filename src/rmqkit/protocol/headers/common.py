"""Fields that any request may carry besides its own. Source: remoting.md §3.1."""

from __future__ import annotations

from msgspec import Struct, field

__all__ = ["CommonFields"]


class CommonFields(Struct, gc=False):
    """What 5.x clients add to every request (``RpcRequestHeader``); also the access key of a signed one.

    Attributes:
        ns: namespace; nsd: the names are namespaced already.
        bname: the broker name the client believes it talks to.
        oway: a one-way hint.
        lo: False asks for the physical queue of a static topic.
    """

    ns: str | None = None
    nsd: bool | None = None
    bname: str | None = None
    oway: bool | None = None
    lo: bool | None = None
    request_type: str | None = field(default=None, name="ReqT")
    zone_name: str | None = field(default=None, name="__ZONE_NAME")
    zone_mode: str | None = field(default=None, name="__ZONE_MODE")
    access_key: str | None = field(default=None, name="AccessKey")
    signature: str | None = field(default=None, name="Signature")
    security_token: str | None = field(default=None, name="SecurityToken")

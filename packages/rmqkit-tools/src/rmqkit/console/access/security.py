"""Checks of the Host header, the origin of requests and the listen address, and the headers of all answers.

==================  ================================================================================================
attack              defence
==================  ================================================================================================
DNS rebinding       `host_fault`: the Host header must be an expected name, also on loopback
cross-site request  `origin_fault`: a request that changes something must come from our own page (Sec-Fetch-Site or
                    Origin); a request with a login cookie must have one of these headers
scripts, frames     `HEADERS`: a policy that allows nothing from other sites and nothing inline
an open console     `listen_fault`: other addresses than loopback require users and TLS: brokers trust the machine
==================  ================================================================================================

All functions here are pure.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Mapping
from urllib.parse import urlsplit

from rmqkit.sentences import _

SAFE = frozenset(("GET", "HEAD"))
"""Methods that change nothing."""

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
    "cross-origin-opener-policy": "same-origin",
}
"""The headers of every answer. Browsers are allowed to cache only our static files."""

_LOOPBACK_NAMES = frozenset(("localhost", "127.0.0.1", "::1"))


def is_loopback(host: str) -> bool:
    """Return True if only this machine can reach a listen address."""
    if host in _LOOPBACK_NAMES:
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def listen_fault(host: str, *, has_users: bool, has_tls: bool, is_behind_proxy: bool, is_insecure: bool) -> str:
    """Return the reason why the console is not allowed to listen on an address, or "" if it is allowed."""
    if is_loopback(host) or is_insecure or (has_users and (has_tls or is_behind_proxy)):
        return ""
    missing = [] if has_users else ["users (--users FILE, --oidc FILE, or --login for those of the cluster)"]
    if not (has_tls or is_behind_proxy):
        missing.append("TLS (--cert and --key, or --behind-proxy NETWORKS)")
    return (
        f"the console does not listen on {host} without {' and '.join(missing)}: brokers trust the machine it runs on; "
        "listen on 127.0.0.1, or give --insecure for a console that only reads and shows no bodies"
    )


def name_of_host(header: str) -> str:
    """Return the name in a Host header, without its port."""
    return (urlsplit(f"//{header}").hostname or "").lower().rstrip(".")


def host_fault(header: str, allowed: Collection[str]) -> str:
    """Return the reason to refuse a Host header, or "" if its name is allowed. ``*`` allows every name."""
    try:
        name = name_of_host(header)
    except ValueError:
        name = ""
    if "*" in allowed or name in allowed or name in _LOOPBACK_NAMES:
        return ""
    return _(
        "Host {header!r} is not a name of this console: start it with --host-name {name} if it is",
        header=header,
        name=name or "NAME",
    )


def origin_fault(method: str, headers: Mapping[str, str], own: str, *, has_cookie: bool) -> str:
    """Return the reason to refuse a request from another site, or "" if the request is allowed.
    ``own`` is the origin of this console, such as ``http://host:port``."""
    if method in SAFE:
        return ""
    # Prefer Sec-Fetch-Site: scripts cannot set this header, and our own origin may be wrong behind a proxy.
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    if site is not None:
        other = _("the request comes from another site (Sec-Fetch-Site: {site})", site=site)
        return "" if site == "same-origin" else other
    if origin is not None:
        return "" if origin == own else _("the request comes from {origin}, and this is {own}", origin=origin, own=own)
    return _("a request with a login's cookie needs Sec-Fetch-Site or Origin") if has_cookie else ""


def is_own_path(path: str) -> bool:
    """Return True if a text is a path of this site, and not an address of another site."""
    # Browsers first remove tabs and line breaks. They read \ as /, and // as the start of another host.
    return path.startswith("/") and not re.search(r"^//|\\|[\x00-\x1f\x7f]|%0[ad]", path, re.IGNORECASE)

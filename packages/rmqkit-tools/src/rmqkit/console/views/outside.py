"""The pages outside of any cluster: the first page, login, audit and about; also static files, colours, language."""

from __future__ import annotations

import asyncio
import platform
from pathlib import Path
from typing import Any
from urllib.parse import quote

from markupsafe import Markup
from starlette.responses import RedirectResponse, Response

from rmqkit.admin import Admin
from rmqkit.admin.diagnosis.health import findings
from rmqkit.console.access import logins
from rmqkit.console.access.logins import LoginRefused, Role, User
from rmqkit.console.access.security import is_own_path
from rmqkit.console.html.translation import LANGUAGES
from rmqkit.console.request.request import Ask, Fault, Page
from rmqkit.errors import PeerRefused, RmqError
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.schemas.access import UserInfo, UserRequest
from rmqkit.remoting.authentication import Credentials
from rmqkit.sentences import _

_STATIC = Path(__file__).parents[1] / "html" / "static"
_KINDS = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_THEME_SECONDS = 365 * 86_400


async def home(ask: Ask) -> Page | Response:
    """Redirect to the only cluster, or show the list of clusters."""
    envs = list(ask.console.envs.values())
    if len(envs) == 1 and "format" not in ask.query:
        return RedirectResponse(ask.link.to(envs[0].name), 307)
    rows = []
    for env in envs:
        env.watcher.look()
        snapshot = env.watcher.snapshot
        known = {"brokers": len(snapshot.brokers), "findings": len(findings(snapshot)), "trouble": env.watcher.trouble}
        rows.append({"name": env.name, "nameServers": env.name_servers} | known)
    return Page("home.html", _("Clusters"), {"clusters": rows})


async def login(ask: Ask) -> Page | Response:
    """Log in or out."""
    back, console = _back(ask), ask.console
    if ask.request.method != "POST":
        return await _login_page(ask, "", 200)
    response = RedirectResponse(ask.link.out().rstrip("/") + back if back else ask.link.out(), 303)
    if ask.form.get("leave"):
        if console.oidc is not None and ask.user.name.startswith("oidc:"):
            response = RedirectResponse(ask.link.out("login", left=1), 303)
        console.end_session(ask.request, response)
        return response
    name, secret = ask.form.get("name", "").strip(), ask.form.get("secret", "")
    _try(ask)
    user, why = await _user_of(ask, name, secret)
    if user is None:
        console.audit.write(name[:100], ask.address, "", "login", "", "refused", why)
        return await _login_page(ask, why, 401)
    _enter(ask, response, user)
    return response


async def oidc(ask: Ask) -> Page | Response:
    """Log in by OpenID Connect: redirect to the provider, and handle the return of the browser."""
    console, provider = ask.console, ask.console.oidc
    if provider is None:
        raise Fault(404, _("No such page"), _("this console has no OpenID Connect: start it with --oidc FILE"))
    kept: dict[str, Any] = {"httponly": True, "samesite": "lax", "secure": console.is_secure, "path": "/"}
    here, cookie = console.origin(ask.request) + ask.link.out("login", "oidc"), f"{console.cookie}_oidc"
    try:
        if "state" not in ask.query:
            address, text = await provider.begin(here, _back(ask))
            going = RedirectResponse(address, 303)
            # Unlike the session cookie, this cookie is not strict, because the browser returns from another site.
            going.set_cookie(cookie, text, max_age=600, **kept)
            return going
        _try(ask)
        user, back = await provider.finish(ask.query, ask.request.cookies.get(cookie, ""), here)
    except LoginRefused as refused:
        if "state" in ask.query:  # the other step has no limit on tries, and could flood the audit
            console.audit.write("?", ask.address, "", "login", "", "refused", str(refused))
        return await _login_page(ask, str(refused), 401)
    # Return a page, not a redirect: browsers send a strict cookie only if the navigation began on this site.
    place = ask.link.out().rstrip("/") + back if back else ask.link.out()
    page = '<!doctype html><title>{0}</title><meta http-equiv="refresh" content="0; url={1}"><a href="{1}">{0}</a>'
    text = Markup(page).format(ask.say(_("You are logged in")), quote(place, safe=":/%#?=&"))
    response = Response(text, media_type="text/html")
    response.delete_cookie(cookie, **kept)
    _enter(ask, response, user)
    return response


def _back(ask: Ask) -> str:
    """Return the path to show after a login; empty if the path is not on this site."""
    return ask.text("next") if is_own_path(ask.text("next")) else ""


async def _login_page(ask: Ask, trouble: str, status: int) -> Page:
    # Offer to leave also after a refusal, because the provider would log in the same account again.
    is_left = bool(ask.text("left") or ask.text("state"))
    provider, here = ask.console.oidc, ask.console.origin(ask.request) + ask.link.out("login")
    values = {
        "isCluster": ask.console.is_cluster_login,
        "hasPasswords": ask.console.is_cluster_login or ask.console.file_users is not None,
        "provider": provider.settings.label if provider is not None else "",
        "leave": await provider.leave_address(here) if provider is not None and is_left else "",
        "trouble": trouble,
    }
    more = {"next": _back(ask)}
    return Page("login.html", _("Log in"), values, more, status=status)


def _try(ask: Ask) -> None:
    """Count a try before any slow check of the login. Raises Fault: there were too many tries."""
    if not ask.console.tries.may_try(ask.address):
        why = _("{tries} tries a minute: wait a minute, then try again", tries=logins.TRIES_A_MINUTE)
        raise Fault(429, _("Too many tries"), why)


def _enter(ask: Ask, response: Response, user: User) -> None:
    ask.console.tries.succeeded(ask.address)
    ask.console.audit.write(user.name, ask.address, "", "login", "", "done", user.role)
    ask.console.begin_session(response, user)


async def _user_of(ask: Ask, name: str, secret: str) -> tuple[User | None, str]:
    """Return the user of a login, or None with the reason of the refusal."""
    console = ask.console
    if console.file_users is not None:
        found = await asyncio.to_thread(console.file_users.check, name, secret)
        if found is not None or not console.is_cluster_login:
            return found, _("name or password is wrong")
    if not console.is_cluster_login:
        return None, _("this console has no logins")
    if not name or not secret:
        return None, _("give access key and secret key")
    env = next(iter(console.envs.values()))
    return await cluster_user(ask, env.name_servers, name, secret)


async def cluster_user(ask: Ask, name_servers: str, name: str, secret: str) -> tuple[User | None, str]:
    """Return a user of the cluster, or None with a reason. A wrong secret must be refused, the secret accepted."""
    right = Credentials(access_key=name, secret_key=secret)
    wrong = Credentials(access_key=name, secret_key=f"{secret}, not")
    try:
        # Try a wrong secret first: if it passes, the right secret proves nothing.
        if await _is_let_in(ask, name_servers, wrong):
            return None, _("the cluster accepts everyone: it has no users to log in as; use --users FILE")
        if not await _is_let_in(ask, name_servers, right):
            return None, _("access key or secret key is wrong")
    except RmqError as error:
        return None, str(error)
    return User(name, await _role(ask, name_servers, right), right), ""


async def _is_let_in(ask: Ask, name_servers: str, signing: Credentials) -> bool:
    async with Admin(name_servers, credentials=signing, timeout_ms=3_000, clock=ask.console.clock) as admin:
        address = next(iter((await _masters(ask)).values()))
        try:
            await admin.calls.runtime_info(address)
        except PeerRefused as error:
            if error.code != ResponseCode.NO_PERMISSION:
                raise
            # A known user may lack the permission for the figures. Apache's brokers and ours then use this remark.
            return "has no permission" in str(error)
    return True


async def _masters(ask: Ask) -> dict[str, str]:
    env = next(iter(ask.console.envs.values()))
    admin = ask.console.borrow(env, logins.LOCAL, may_change=False)
    try:
        admin.calls.forget()
        masters = await admin.calls.masters()
    finally:
        ask.console.give_back(admin)
    if not masters:
        raise RmqError(_("no broker to ask: the name servers know no master"))
    return masters


async def _role(ask: Ask, name_servers: str, signing: Credentials) -> Role:
    """Return the role of a user: admin for ``Super`` users, and operator for others."""
    async with Admin(name_servers, credentials=signing, timeout_ms=3_000, clock=ask.console.clock) as admin:
        address = next(iter((await _masters(ask)).values()))
        try:
            found = await admin.calls.fetch(
                UserInfo, address, RequestCode.AUTH_GET_USER, UserRequest(signing.access_key)
            )
        except RmqError:
            return Role.OPERATOR
    return Role.ADMIN if (found.user_type or "").lower() == "super" else Role.OPERATOR


async def theme(ask: Ask) -> Response:
    """Set the cookie with the colour scheme (light, dark, or the system's) or with the language."""
    chosen, language = ask.form.get("theme", ""), ask.form.get("lang", "")
    back = ask.form.get("back", "")
    response = RedirectResponse(back if is_own_path(back) else ask.link.out(), 303)
    if language in LANGUAGES:
        response.set_cookie("rmq_lang", language, max_age=_THEME_SECONDS, samesite="strict", path="/")
    elif chosen in ("light", "dark"):
        response.set_cookie("rmq_theme", chosen, max_age=_THEME_SECONDS, samesite="strict", path="/")
    else:
        response.delete_cookie("rmq_theme", path="/")
    return response


async def audit(ask: Ask) -> Page:
    """Show the last lines of the audit."""
    wanted = ask.text("q")
    lines = ask.console.audit.lines(wanted)
    total = len(ask.console.audit.lines())
    path = ask.console.audit.path
    values = {"lines": lines[:500], "matched": len(lines), "total": total, "file": str(path) if path else ""}
    return Page("audit.html", _("Audit"), values, {"q": wanted})


async def about(ask: Ask) -> Page:
    """Show versions, load and health. With ``format`` (for probes), the status is 503 while a cluster is silent."""
    console = ask.console
    now_ms = console.clock.monotonic_ms()
    costs = [
        {"env": env.name, "address": address, "requests": cost.requests, "bytes": cost.sent_bytes}
        | {"perSecond": round(cost.per_second(now_ms), 2)}
        for env in console.envs.values()
        for address, cost in sorted(env.costs.items())
    ]
    clusters = [
        {
            "name": env.name,
            "nameServers": env.name_servers,
            "snapshotAgeMs": console.clock.now_ms() - env.watcher.snapshot.at_ms
            if env.watcher.snapshot.at_ms
            else None,
            "trouble": env.watcher.trouble,
        }
        for env in console.envs.values()
    ]
    # Before the first snapshot, the health is unknown.
    is_well = all(env.watcher.snapshot.at_ms and not env.watcher.trouble for env in console.envs.values())
    values = {
        "version": console.version,
        "python": platform.python_version(),
        "isWell": is_well,
        "upMs": console.clock.now_ms() - console.began_ms,
        "readOnly": console.read_only,
        "user": ask.user.name,
        "role": ask.user.role,
        "clusters": clusters,
        "costs": costs,
        "streams": {kind: count for kind, count in console.streams.items() if " " not in kind and count},
    }
    status = 503 if not is_well and "format" in ask.query else 200
    return Page("about.html", _("About this console"), values, status=status)


async def static(ask: Ask) -> Response:
    """Return a static file."""
    file = _STATIC / ask.params["file"]
    kind = _KINDS.get(file.suffix)
    # The name comes from the address and must not lead out of the folder.
    if kind is None or file.parent != _STATIC or not file.is_file():
        raise Fault(404, _("No such file"), _("there is no file {params}", params=ask.params["file"]))
    headers = {"cache-control": "public, max-age=3600"} if ask.text("v") else {"cache-control": "no-cache"}
    return Response(file.read_bytes(), media_type=kind, headers=headers)

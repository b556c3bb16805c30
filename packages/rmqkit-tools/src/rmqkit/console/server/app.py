"""The console as an ASGI app, and the steps of a request.

The steps are in this order: check the Host header · check that a change comes from our own page · find the view
(`rmqkit.console.request.routes`) · find the user · render HTML or JSON · add headers.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import functools
import logging
import re
from importlib import import_module
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import compile_path
from starlette.types import Receive, Scope, Send

from rmqkit.console.access import security
from rmqkit.console.access.logins import LOCAL, Role, User
from rmqkit.console.html import render
from rmqkit.console.html.translation import LANGUAGES
from rmqkit.console.request import live
from rmqkit.console.request.request import Ask, Fault, Page, View
from rmqkit.console.request.routes import ROUTES, Route
from rmqkit.console.request.state import Env, Hub
from rmqkit.errors import NoNameServer, PeerRefused, ReadOnly, RequestTimedOut, RmqError, SettingsError, UnknownName
from rmqkit.protocol.codes import ResponseCode
from rmqkit.sentences import _

__all__ = ["Console"]

FIRST_SNAPSHOT_S = 1.5
PROOF_S = 1.0
_log = logging.getLogger(__name__)


class Console(Hub):
    """The console as an ASGI app with a lifespan. A console in another app starts with the first request. Use ``async
    with console`` in the lifespan of the other app, so that the console is closed.

    Args:
        env: the name servers of one cluster, ``host:port;host:port``, or of several clusters by name.
        read_only: True if no user is allowed to make changes.
        login: True if users must log in as a user of the cluster (ACL 2.0).
        users: a file of users who can log in (`rmqkit.console.access.logins`).
        oidc: a file with a provider of OpenID Connect (`rmqkit.console.access.oidc`). Its users can log in.
        authorize: a function in place of a login. It returns the user of a request, or None for no access.
        credentials: the credentials for the console's own requests, and for users without credentials.
        tls: the TLS settings for connections to name servers and brokers; None: no encryption.
        hide_bodies: True if viewers see no message bodies.
        hide_all_bodies: True if no user sees message bodies.
        host_names: the allowed names in the Host header besides loopback; ``*`` if another app checks the header.
        audit: a file for the lines of the audit; None: the audit is only in memory.
        state: a folder for the history and the alert rules of each cluster; None: they are only in memory.
        rules: a file of rules and channels that each cluster loads at the start.
        jobs: a folder for replays; None: no replays. A later console continues unfinished replays.
        banner: a sentence for every page.
        is_secure: True if browsers use https, even if the connection here is http.
        hooks: decoders of bodies and additional pages (`rmqkit.console.hooks`); None: all installed hooks.

    Raises SettingsError: a name or an address is not valid, or a file cannot be read.
    """

    @functools.cached_property
    def routes(self) -> list[tuple[re.Pattern[str], Route, View]]:
        own: dict[str, View] = {"events": self.events}
        found = [(compile_path(route.path)[0], route, own.get(route.view) or _view(route.view)) for route in ROUTES]
        for page in self.hooks.pages:
            route = Route(f"/{{env}}/own/{page.path}", page.title, page.title, live_s=page.live_s)
            found.append((compile_path(route.path)[0], route, page.view))
        return found

    def find_route(self, path: str) -> tuple[Route, View, dict[str, str]] | None:
        """Return the route and the view of a path, and the names in the path; None if there is no such page."""
        for pattern, route, view in self.routes:
            if (match := pattern.match(path)) is not None:
                return route, view, match.groupdict()
        return None

    # -- requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] == "http":
            self.start()
            began_ms = self.clock.monotonic_ms()
            response = await self.answer(Request(scope, receive))
            response.headers["server-timing"] = f"page;dur={self.clock.monotonic_ms() - began_ms:.1f}"
            for name, value in security.HEADERS.items():
                response.headers.setdefault(name, value)
            await response(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                self.start()
                await send({"type": "lifespan.startup.complete"})
            else:
                await self.close()
                await send({"type": "lifespan.shutdown.complete"})
                return

    async def answer(self, request: Request) -> Response:
        """Return the response to a request. An error becomes an error page."""
        user = User("nobody", Role.VIEWER)
        ask = Ask(self, request, user, None, {})
        try:
            # Check the Host first: after DNS rebinding, a page of another site could read even a redirect or a 404.
            self._check(request)
            path = _path_below(request.scope)
            found = self.find_route(path)
            if found is None:
                if not path.endswith("/") and self.find_route(path + "/"):
                    return RedirectResponse(ask.link.out(*path.strip("/").split("/")) + "/", 307)
                raise Fault(404, _("No such page"), _("there is no page {path}", path=path))
            route, view, names = found
            user = self._user(request) or user
            env = env_of(self, names)
            ask = Ask(self, request, user, env, names)
            if user.name == "nobody" and route.path not in ("/login", "/login/oidc", "/static/{file}", "/theme"):
                return self._to_login(ask, request, path)
            if request.method == "POST":
                if not route.posts:
                    raise Fault(405, _("Not a form"), _("{path} is a page; it accepts no POST", path=route.path))
                await ask.read_form()
            elif request.method not in security.SAFE:
                raise Fault(405, _("Not a method"), _("{method} is not GET, HEAD or POST", method=request.method))
            if env is not None:
                env.watcher.look()
                await env.watcher.first(FIRST_SNAPSHOT_S)
            if request.method == "POST":
                # Check the user before the view, not at the same time: a refused user must not change anything.
                await self._prove(ask)
                page = await (ask.confirmed(token) if (token := ask.form.get("review")) else view(ask))
            else:
                page, __ = await asyncio.gather(view(ask), self._prove(ask))
            return self._shown(ask, route, page)
        except Exception as error:  # noqa: BLE001 - the outer edge of a request: for any error the browser gets a page
            return self._failed(ask, error)
        finally:
            ask.close()  # a stream borrows the connection again when it begins

    def _check(self, request: Request) -> None:
        """Raise Fault if the Host header or the origin of a request is not allowed."""
        headers = request.headers
        if why := security.host_fault(headers.get("host", ""), self.host_names):
            raise Fault(421, _("Not this console"), why)
        own = self.origin(request)
        if why := security.origin_fault(request.method, headers, own, has_cookie=self.cookie in request.cookies):
            self.audit.write(
                "?", request.client.host if request.client else "?", "", "request", request.url.path, "refused", why
            )
            raise Fault(403, _("From another site"), why)

    def _user(self, request: Request) -> User | None:
        if self.authorize is not None:
            return self.authorize(request)
        if not self.needs_login:
            return LOCAL if not self.read_only else User("local", Role.VIEWER)
        return self.sessions.user(request.cookies.get(self.cookie, ""))

    async def _prove(self, ask: Ask) -> None:
        """Check that a broker still accepts a user of the cluster, because pages of the snapshot send no other request.
        Do not wait for a slow broker. Raises Fault: the broker refuses the user, and the session is closed."""
        if ask.user.credentials is None or not ask.has_env:
            return
        address = next((one.row.addr for one in ask.snapshot.brokers if one.is_master and not one.trouble), "")
        if not address:
            return
        try:
            async with asyncio.timeout(PROOF_S):
                await ask.admin.calls.runtime_info(address)
        except PeerRefused as error:
            if error.code != ResponseCode.NO_PERMISSION or "has no permission" in str(error):
                return
            self.sessions.end(ask.request.cookies.get(self.cookie, ""))
            ask.audit("request", ask.request.url.path, "refused", str(error))
            raise Fault(403, _("The broker refuses"), _("{error}: you are logged out", error=error)) from None
        except (RmqError, TimeoutError):
            return

    def _to_login(self, ask: Ask, request: Request, path: str) -> Response:
        if self.authorize is not None:
            raise Fault(403, _("Not allowed"), _("the program that contains this console refuses you access"))
        if request.method != "GET" or wants_json(request):
            raise Fault(401, _("Not logged in"), _("log in first: {out}", out=ask.link.out("login")))
        back = path + (f"?{request.url.query}" if request.url.query else "")
        return RedirectResponse(ask.link.out("login", next=back), 303)

    async def events(self, ask: Ask) -> Response:
        """Return a stream with the refreshes of the page at ``path``."""
        root = ask.request.scope.get("root_path", "")
        wanted = urlsplit(ask.text("path"))
        path = unquote(wanted.path)
        path = path.removeprefix(root) if root else path
        found = self.find_route(path)
        if found is None or not found[0].live_s:
            raise Fault(404, _("No such page"), _("there is no page {path} that refreshes", path=path))
        __, view, names = found
        env = env_of(self, names)
        scope = {
            **ask.request.scope,
            "path": root + path,
            "raw_path": wanted.path.encode(),
            "query_string": wanted.query.encode(),
        }
        inner = Ask(self, Request(scope), ask.user, env, names)

        async def show() -> Page:
            if env is not None:
                env.watcher.look()
            page, __ = await asyncio.gather(view(inner), self._prove(inner))
            if not isinstance(page, Page):
                raise Fault(404, _("No such page"), _("{path} is not a page that refreshes", path=path))
            page.live_s = found[0].live_s if page.live_s is None else page.live_s
            return page

        return live.refreshes(inner, show, lambda page: self.values_of(inner, page))

    # -- answers

    def values_of(self, ask: Ask, page: Page, *, live_s: float = 0.0) -> dict[str, Any]:
        """Return all values for the template of a page."""
        theme = ask.request.cookies.get("rmq_theme", "")
        common = {
            "ask": ask,
            "link": ask.link,
            "page": page,
            "console": self,
            "theme": theme if theme in ("light", "dark") else "",
            "envs": list(self.envs),
            "here": _here(ask.request),
            "live_s": live_s,
            "lang": ask.language,
            "languages": LANGUAGES,
            "now_ms": self.clock.now_ms(),
        }
        return common | page.values | page.more

    def _shown(self, ask: Ask, route: Route, page: Page | Response) -> Response:
        if isinstance(page, Response):
            return page
        if page.live_s is None:
            page.live_s = route.live_s if ask.request.method in security.SAFE else 0.0
        if wants_json(ask.request):
            return _json({"title": page.title, **page.values}, page.status)
        text = render.html(page.template, self.values_of(ask, page, live_s=page.live_s))
        return Response(text, page.status, media_type="text/html")

    def _failed(self, ask: Ask, error: Exception) -> Response:
        fault = _fault(error)
        if isinstance(error, UnknownName) and ask.has_env:
            fault.near = _near(ask, error)
        if isinstance(error, ReadOnly):
            with contextlib.suppress(OSError):
                ask.audit(error.name, error.address, "refused", str(error))
        if fault.status == 500:
            _log.error("console: %s %s failed", ask.request.method, ask.request.url.path, exc_info=error)
        values = {"status": fault.status, "text": fault.text, "near": [name for name, __ in fault.near]}
        if wants_json(ask.request):
            return _json({"title": fault.title, **values}, fault.status)
        page = Page("error.html", fault.title, values, {"links": fault.near})
        return Response(render.html("error.html", self.values_of(ask, page)), fault.status, media_type="text/html")


def wants_json(request: Request) -> bool:
    """Return True if the client wants JSON, by its Accept header or ``format=json``."""
    if "format" in request.query_params:
        return request.query_params["format"] == "json"
    accept = request.headers.get("accept", "")
    return "application/json" in accept and "text/html" not in accept


def _json(value: Any, status: int = 200) -> Response:
    return Response(render.as_json(value), status, media_type="application/json")


def _fault(error: Exception) -> Fault:
    """Return the error page for an error."""
    match error:
        case Fault():
            return error
        case UnknownName():
            return Fault(404, _("No such {kind}", kind=_(error.kind)), str(error))
        case ReadOnly():
            return Fault(403, _("Not allowed"), str(error))
        case PeerRefused() if error.code == ResponseCode.NO_PERMISSION:
            return Fault(403, _("The broker refuses"), str(error))
        case NoNameServer():
            return Fault(502, _("No name server answers"), str(error))
        case RequestTimedOut() | TimeoutError():
            return Fault(504, _("No answer in time"), str(error) or _("a broker did not answer in time"))
        case SettingsError():
            return Fault(400, _("The request is not valid"), str(error))
        case RmqError():
            return Fault(502, _("The cluster did not answer"), str(error))
    return Fault(500, _("The console failed"), _("this is a fault of the console: its log has the reason"))


def _near(ask: Ask, error: UnknownName) -> list[tuple[str, str]]:
    """Return the most similar names of topics or groups, each with the address of its page."""
    names = {"topic": list(ask.snapshot.topics), "group": list(ask.snapshot.groups)}.get(error.kind, [])
    place = f"{error.kind}s"
    return [(name, ask.link(place, name)) for name in difflib.get_close_matches(error.name, names, n=5)]


def env_of(hub: Hub, names: dict[str, str]) -> Env | None:
    """Remove the cluster from the names in an address, and return it. Raises Fault: there is no such cluster."""
    name = names.pop("env", None)
    if name is None:
        return None
    if name not in hub.envs:
        known = ", ".join(hub.envs)
        reason = _("this console knows no cluster {name}: it knows {known}", name=name, known=known)
        raise Fault(404, _("No such cluster"), reason)
    return hub.envs[name]


def _view(name: str) -> View:
    module, __, function = name.partition(":")
    found: View = getattr(import_module(f"rmqkit.console.views.{module}"), function)
    return found


def _path_below(scope: Scope) -> str:
    """Return the path below the mount point of the console."""
    path, root = scope["path"], scope.get("root_path", "")
    return path[len(root) :] or "/" if root and path.startswith(root) else path


def _here(request: Request) -> str:
    """Return the path of the page, with its query."""
    raw = request.scope.get("raw_path") or quote(request.scope["path"]).encode()
    text = raw.decode("latin-1").partition("?")[0]
    return text + (f"?{request.url.query}" if request.url.query else "")

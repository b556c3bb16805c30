"""The common state of all requests: clusters, watchers, connections of users, sessions, reviews, the audit."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Self
from urllib.parse import quote

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from rmqkit.admin import Admin
from rmqkit.admin import read_only as refuse_changes
from rmqkit.admin.diagnosis.health import Snapshot
from rmqkit.clock import SYSTEM_CLOCK, Clock
from rmqkit.console.access.audit import Audit
from rmqkit.console.access.confirmations import Reviews
from rmqkit.console.access.logins import FileUsers, Sessions, Tries, User
from rmqkit.console.alerts.rules import Alerts
from rmqkit.console.hooks import Hooks, installed
from rmqkit.console.jobs import Job, Jobs
from rmqkit.console.request.routes import OUTSIDE
from rmqkit.console.watch.history import History
from rmqkit.console.watch.watcher import Watcher
from rmqkit.errors import SettingsError
from rmqkit.protocol.command import Command
from rmqkit.remoting.authentication import Credentials
from rmqkit.remoting.tasks import Tasks
from rmqkit.remoting.tls import ClientTls
from rmqkit.sentences import _

if TYPE_CHECKING:
    from rmqkit.console.access.oidc import Oidc

__all__ = ["Cost", "Env", "Hub"]

COOKIE = "rmq_console"
TIMEOUT_MS = 3_000.0
ADMINS_MAX = 200


class Cost(Struct):
    """The load of the console on a server: total requests and bytes, and the times of the last requests."""

    requests: int = 0
    sent_bytes: int = 0
    began_ms: float = 0.0
    recent: list[float] = []

    def add(self, now_ms: float, size: int) -> None:
        self.requests += 1
        self.sent_bytes += size
        self.recent.append(now_ms)
        if len(self.recent) > 2_000:
            del self.recent[:1_000]

    def per_second(self, now_ms: float) -> float:
        """Return the requests per second in the last minute, or since the first request."""
        self.recent[:] = [at for at in self.recent if now_ms - at < 60_000]
        return len(self.recent) / max(1.0, min(60.0, (now_ms - self.began_ms) / 1000))


class Env:
    """One cluster: its name servers, its watcher, and its load. Page addresses begin with ``name``."""

    def __init__(self, name: str, name_servers: str, hub: Hub) -> None:
        self.name = name
        self.name_servers = name_servers
        self.costs: dict[str, Cost] = {}
        self.clock = hub.clock
        self.watcher = Watcher(hub.new_admin(self, None, may_change=False))
        self.history = History(hub.state_file(name, name_servers, "history"), hub.clock)
        self.alerts = Alerts(name, hub.state_file(name, name_servers, "alerts.json"), hub.clock)
        self.watcher.followers += [self.history.follow, self.look]

    def start(self) -> None:
        self.watcher.start()
        self.history.start()
        self.alerts.start()

    async def close(self) -> None:
        await self.watcher.close()
        await self.history.close()
        await self.alerts.close()

    async def look(self, snapshot: Snapshot) -> None:
        """Apply the alert rules to a snapshot. The watcher calls this method for each snapshot."""
        self.watcher.is_needed = self.alerts.is_needed
        self.alerts.look(snapshot)

    def count(self, address: str, command: Command) -> None:
        """Count a request. `Admin` calls this method as its guard."""
        now_ms = self.clock.monotonic_ms()
        cost = self.costs.setdefault(address, Cost(began_ms=now_ms, recent=[]))
        cost.add(now_ms, len(command.payload) + 100)


class Hub:
    """The state of a console, for the event loop only. `rmqkit.console.server.app.Console` describes the arguments."""

    def __init__(
        self,
        env: str | Mapping[str, str],
        *,
        read_only: bool = False,
        login: bool = False,
        users: Path | None = None,
        oidc: Path | None = None,
        authorize: Callable[[Request], User | None] | None = None,
        credentials: Credentials | None = None,
        tls: ClientTls | None = None,
        hide_bodies: bool = False,
        hide_all_bodies: bool = False,
        host_names: Sequence[str] = (),
        audit: Path | None = None,
        state: Path | None = None,
        rules: Path | None = None,
        jobs: Path | None = None,
        banner: str = "",
        is_secure: bool = False,
        hooks: Sequence[object] | None = None,
        clock: Clock = SYSTEM_CLOCK,
        timeout_ms: float = TIMEOUT_MS,
    ) -> None:
        self.clock = clock
        self.read_only = read_only
        self.needs_login = login or users is not None or oidc is not None
        self.is_cluster_login = login
        self.file_users = None if users is None else FileUsers(users)
        self.oidc: Oidc | None = None
        if oidc is not None:
            from rmqkit.console.access import oidc as by_oidc  # importing Authlib takes 0.7 s of CPU

            self.oidc = by_oidc.Oidc(by_oidc.OidcSettings.load(oidc), clock)
        self.hide_bodies, self.hides_all_bodies = hide_bodies, hide_all_bodies
        self.banner = banner
        self.version = version("rmqkit")
        self.began_ms = clock.now_ms()
        self.sessions, self.tries = Sessions(clock), Tries(clock)
        self.reviews = Reviews(clock)
        self.streams: dict[str, int] = {}
        self.ending = asyncio.Event()
        self.last_sent: dict[tuple[str, str, str], dict[str, str]] = {}
        self.authorize = authorize
        self._credentials, self._tls, self._timeout_ms = credentials, tls, timeout_ms
        self.host_names = frozenset(name.lower() for name in host_names)
        self.is_secure = is_secure
        self._admins: dict[tuple[str, str, str, bool], Admin] = {}
        self._borrowed: Counter[Admin] = Counter()
        self._closing = Tasks()
        self._state, self._has_names = state, not isinstance(env, str)
        self.envs = {name: Env(name, servers, self) for name, servers in _named(env).items()}
        if rules is not None:
            for one in self.envs.values():
                one.alerts.take(rules)
        self._is_started = False
        self.hooks = Hooks(self, installed() if hooks is None else hooks)
        self.jobs = Jobs(jobs, credentials=credentials, tls=tls, report=self._note_job)
        self.audit = Audit(audit, clock)  # last, so that an earlier error leaves no file open

    # -- life

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    def start(self) -> None:
        """Start the watchers and their followers, if they are not running."""
        if not self._is_started:
            self._is_started = True
            for env in self.envs.values():
                env.start()
            if not self.read_only:
                self.jobs.resume_own({env.name: env.name_servers for env in self.envs.values()})

    async def close(self) -> None:
        """Stop the watchers and jobs, save the state, and close every connection."""
        # Close jobs first: they write their results to the audit, which is closed last.
        await self.jobs.close()
        for env in self.envs.values():
            await env.close()
        await asyncio.gather(self._closing.finish(), *(admin.close() for admin in self._admins.values()))
        self.audit.close()

    def state_file(self, name: str, name_servers: str, kind: str) -> Path | None:
        """Return the path for a kind of state. The path of a cluster without a name contains its name servers."""
        if self._state is None:
            return None
        own = name if self._has_names else f"{name}-{re.sub(r'[^A-Za-z0-9.-]+', '_', name_servers)[:120]}"
        return self._state / f"{own}.{kind}"

    # -- for views

    def _note_job(self, job: Job, outcome: str, detail: str) -> None:
        self.audit.write(job.user, "", job.env, _("replay dead letters"), job.group, outcome, detail)

    def new_admin(self, env: Env, user: User | None, *, may_change: bool) -> Admin:
        """Return a connection to a cluster. It counts requests, and without ``may_change`` refuses changes."""

        def guard(address: str, command: Command) -> None:
            if not may_change:
                refuse_changes(address, command)
            env.count(address, command)

        signing = (user.credentials if user is not None else None) or self._credentials
        admin = Admin(
            env.name_servers, timeout_ms=self._timeout_ms, tls=self._tls, credentials=signing, clock=self.clock,
            guard=guard,
        )  # fmt: skip
        if user is None:
            self._admins[env.name, "", "", False] = admin
        return admin

    def borrow(self, env: Env, user: User, *, may_change: bool) -> Admin:
        """Return the connection of a user. The connection stays open until `give_back`."""
        signing = user.credentials
        # The key contains the right: a viewer must never get the connection of an operator. The key contains the
        # secret: a user who only knows the name of another user must not get the other user's connection.
        key = (
            env.name,
            "user:" + (signing.access_key if signing else ""),
            signing.secret_key if signing else "",
            may_change,
        )
        admin = self._admins.pop(key, None) or self.new_admin(env, user, may_change=may_change)
        self._admins[key] = admin
        self._borrowed[admin] += 1
        self._close_old()
        return admin

    def give_back(self, admin: Admin) -> None:
        """Subtract 1 from the number of requests that use a connection. An unused connection may be closed."""
        # Each `give_back` belongs to one `borrow`.
        assert self._borrowed[admin] > 0
        self._borrowed[admin] -= 1
        if not self._borrowed[admin]:
            del self._borrowed[admin]
        self._close_old()

    def _close_old(self) -> None:
        """Close the least recently used idle connections if there are more than `ADMINS_MAX` connections."""
        of_users = [key for key in self._admins if key[1]]  # without the watchers' connections
        over = len(of_users) - ADMINS_MAX
        if over <= 0:
            return
        idle = [key for key in of_users if self._admins[key] not in self._borrowed]
        for key in idle[:over]:
            self._closing.start(self._admins.pop(key).close(), "console-connection")

    # -- sessions

    @property
    def cookie(self) -> str:
        # With this prefix, browsers refuse a cookie that is insecure or was set by another host.
        return f"__Host-{COOKIE}" if self.is_secure else COOKIE

    def origin(self, request: Request) -> str:
        """Return the origin of this console as the browser sees it, such as ``https://host:port``."""
        scheme = "https" if self.is_secure or request.scope.get("scheme") == "https" else "http"
        return f"{scheme}://{request.headers.get('host', '')}"

    def begin_session(self, response: Response, user: User) -> None:
        """Start a session and set its cookie in a response."""
        response.set_cookie(
            self.cookie, self.sessions.begin(user), httponly=True, samesite="strict", secure=self.is_secure, path="/"
        )

    def end_session(self, request: Request, response: Response) -> None:
        self.sessions.end(request.cookies.get(self.cookie, ""))
        response.delete_cookie(self.cookie, path="/", secure=self.is_secure, httponly=True, samesite="strict")


def _named(env: str | Mapping[str, str]) -> dict[str, str]:
    """Return clusters by name. Raises SettingsError: a name is not valid in an address, or there is no cluster."""
    found = {"local": env} if isinstance(env, str) else dict(env)
    if not found:
        raise SettingsError("the console needs the name servers of a cluster: -n HOST:PORT")
    for name in found:
        if name in OUTSIDE or not name or "/" in name or name != quote(name, safe=""):
            why = _("cluster name {name!r} cannot be part of an address: use letters, digits, - and _", name=name)
            raise SettingsError(why)
    return found

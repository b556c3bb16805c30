"""`Ask`, the input of a view, `Page`, its result, and `Fault`, an error page.

A view is a coroutine function from `Ask` to `Page`. The ``values`` of a page become HTML through a template, or JSON.
The watcher's snapshot has the rows of lists. `Ask.admin` sends requests to brokers. It signs them as the user, and
refuses changes by users who have only the right to read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import parse_qsl

from markupsafe import Markup
from msgspec import Struct, field
from starlette.requests import Request
from starlette.responses import Response

from rmqkit.admin import Admin
from rmqkit.admin.diagnosis.health import Snapshot
from rmqkit.console.access.confirmations import Review, Right, difference
from rmqkit.console.access.logins import Role, User
from rmqkit.console.hooks import OwnPage
from rmqkit.console.html import translation
from rmqkit.console.html.render import Link
from rmqkit.console.request.state import Env, Hub
from rmqkit.errors import RmqError
from rmqkit.sentences import _, joined

ROWS = 100
"""The number of rows on a page of a list."""
FORM_BYTES_MAX = 6 << 20
_PLACES = {
    "topics": _("Topics"), "groups": _("Groups"), "brokers": _("Brokers"), "alerts": _("Alerts"),
    "dead": _("Dead letters"), "jobs": _("Replays"),
}  # fmt: skip


class Fault(Exception):
    """An error page as the answer to a request. ``status`` is the HTTP status, ``near`` has links to similar names."""

    def __init__(self, status: int, title: str, text: str, near: list[tuple[str, str]] | None = None) -> None:
        super().__init__(text)
        self.status = status
        self.title = title
        self.text = text
        self.near = near or []


class Page(Struct):
    """The result of a view.

    Attributes:
        template: the name of a file in ``templates``.
        title: the heading of the page.
        values: the values for the template and for JSON.
        more: further values only for the template.
        live_s: the seconds between refreshes; 0: no refreshes; None: the value in the table of addresses.
        command: the equivalent command line.
        status: the HTTP status of the answer.
        crumbs: the texts and addresses of the pages above this one.
    """

    template: str
    title: str
    values: dict[str, Any]
    more: dict[str, Any] = field(default_factory=dict)
    live_s: float | None = None
    command: str = ""
    status: int = 200
    crumbs: list[tuple[str, str]] = field(default_factory=list)


class Part(Struct, rename="camel"):
    """A part of a page that may fail separately. It has a value, or the error in ``trouble``."""

    value: Any = None
    trouble: str = ""


class Rows(Struct, rename="camel", kw_only=True):
    """One page of a list: its ``rows``, the number that ``matched`` the filter, and the unfiltered ``total``."""

    rows: list[Any]
    number: int
    pages: int
    matched: int
    total: int


class Ask:
    """One request. ``form`` has the posted fields, ``params`` the names in the path, ``query`` the query parameters."""

    def __init__(self, console: Hub, request: Request, user: User, env: Env | None, params: Mapping[str, str]) -> None:
        self.console = console
        self.request = request
        self.user = user
        self.params = params
        self.query: dict[str, str] = dict(parse_qsl(request.url.query, keep_blank_values=True))
        self.form: dict[str, str] = {}
        self.link = Link(request.scope.get("root_path", ""), env.name if env is not None else "")
        self._env = env
        self._admin: Admin | None = None

    def crumbs(self, place: str, *names: str) -> list[tuple[str, str]]:
        """Return the crumbs of a page below a list, or below an object of the list."""
        return [(_PLACES[place], self.link(place)), *((name, self.link(place, name)) for name in names)]

    @property
    def env(self) -> Env:
        """The cluster in the address."""
        assert self._env is not None, "the address has a cluster"
        return self._env

    @property
    def has_env(self) -> bool:
        return self._env is not None

    @property
    def snapshot(self) -> Snapshot:
        """The latest snapshot of the watcher."""
        return self.env.watcher.snapshot

    @property
    def language(self) -> str:
        """The language of the page: chosen by the user, or requested by the browser."""
        return translation.chosen(
            self.request.cookies.get("rmq_lang", ""), self.request.headers.get("accept-language", "")
        )

    def say(self, text: str) -> str:
        """Return a sentence in the user's language."""
        return translation.said(text, self.language)

    @property
    def admin(self) -> Admin:
        """The user's connection to the cluster. Its cached routes are dropped. The request uses it until `close`."""
        if self._admin is None:
            self._admin = self.console.borrow(self.env, self.user, may_change=self.may_change)
        self._admin.calls.forget()
        return self._admin

    def close(self) -> None:
        """Return the connection to the console at the end of the request or of its stream."""
        if self._admin is not None:
            self.console.give_back(self._admin)
            self._admin = None

    @property
    def may_change(self) -> bool:
        return self.user.role.may_change and not self.console.read_only

    @property
    def hides_bodies(self) -> bool:
        """True if this user is not allowed to see message bodies."""
        return self.console.hides_all_bodies or (self.console.hide_bodies and not self.user.role.may_change)

    @property
    def address(self) -> str:
        """The address of the client."""
        return self.request.client.host if self.request.client else "?"

    def text(self, name: str, default: str = "") -> str:
        """Return a query parameter without white space at its ends."""
        return self.query.get(name, default).strip()

    def number(self, name: str, default: int, low: int = 0, high: int = (1 << 62)) -> int:
        """Return an integer query parameter, limited to the bounds. Raises Fault: the text is not an integer."""
        text = self.text(name)
        if not text:
            return default
        if not text.lstrip("-").isdecimal() or len(text) > 20:
            why = _("{name}={text} must be a whole number from {low} on", name=name, text=text, low=low)
            raise Fault(400, _("Not a number"), why)
        return min(max(int(text), low), high)

    async def read_form(self) -> None:
        """Read the posted form. Raises Fault: the body is too large, or is not a form."""
        kind = self.request.headers.get("content-type", "application/x-www-form-urlencoded").partition(";")[0]
        if kind.strip() not in ("application/x-www-form-urlencoded", ""):
            why = _("content type {kind} is not accepted: post application/x-www-form-urlencoded", kind=kind)
            raise Fault(415, _("Not a form"), why)
        parts, size = [], 0
        async for chunk in self.request.stream():
            size += len(chunk)
            if size > FORM_BYTES_MAX:
                raise Fault(413, _("Too much"), _("a form may have {most:,} bytes", most=FORM_BYTES_MAX))
            parts.append(chunk)
        self.form = dict(
            parse_qsl(b"".join(parts).decode("utf-8", "replace"), keep_blank_values=True, max_num_fields=200)
        )

    def audit(self, action: str, target: str, outcome: str, detail: str = "") -> None:
        env = self._env.name if self._env is not None else ""
        self.console.audit.write(self.user.name, self.address, env, action, target, outcome, detail)

    def may(self, right: Right) -> bool:
        """Return True if the user has a right in this console."""
        is_admin = self.user.role is Role.ADMIN or (right is Right.ADMINISTER and self.user.credentials is not None)
        return self.may_change and (is_admin or right is Right.SEND)

    def require_change(self, action: str, target: str, right: Right = Right.ADMINISTER) -> None:
        """Check the user's right, and write a refusal to the audit. Raises Fault: the user does not have the right."""
        if self.may(right):
            return
        why = _("{user} is a viewer", user=self.user.name)
        if self.console.read_only:
            why = _("this console is read-only")
        elif self.may_change and right is Right.CONSOLE:
            why = _("{name} is not an admin: alerts make the console send to addresses", name=self.user.name)
        elif self.may_change:
            why = _("{user} is an operator, who sends messages", user=self.user.name)
        self.audit(action, target, "refused", why)
        raise Fault(
            403,
            _("Not allowed"),
            _("{action} to {target} was not done: {why}", action=_(action), target=target, why=why),
        )

    def review(self, review: Review, token: str = "", trouble: str = "") -> Page:
        """Return the page on which the user confirms a change."""
        review.user, review.env = self.user.name, self.env.name
        values = {
            "action": review.action,
            "target": review.target,
            "rows": review.rows,
            "requests": review.requests,
            "typed": review.typed,
            "moves": review.moves,
            "warning": review.warning,
            "trouble": trouble,
            "token": token or self.console.reviews.open(review),
        }
        return Page(
            "review.html", _("Review: {action}", action=_(review.action)), values, {"back": review.back},
            command=review.command, status=400 if trouble else 200,
        )  # fmt: skip

    async def confirmed(self, token: str) -> Page:
        """Make a reviewed change once, and return the page of its result. A second confirmation shows the first result.
        Raises Fault: the review has expired, or its subject has changed."""
        review = self.console.reviews.find(token, self.user.name)
        if review is None:
            why = _("this review is too old, or belongs to another user: fill in the form again")
            raise Fault(409, _("Review again"), why)
        self.require_change(review.action, review.target, review.right)
        if review.typed and self.form.get("typed", "").strip() != review.typed:
            return self.review(review, token, _("type {typed} to confirm it", typed=review.typed))
        if review.done is None:
            # There is no await since the check, so a second click finds the future and does not repeat the change.
            review.done = asyncio.get_running_loop().create_future()
            # Write the audit before the change, so that the audit has a line even if the process crashes.
            self.audit(review.action, review.target, "intent", joined("; ", review.requests))
            try:
                await self._check_unchanged(review)
                result = await review.run()
            except BaseException as error:
                outcome = "refused" if isinstance(error, Fault) else "failed"
                self.audit(review.action, review.target, outcome, str(error) or type(error).__name__)
                is_kept = isinstance(error, RmqError | Fault)
                review.done.set_exception(error if is_kept else RmqError(str(error) or _("it was cut off")))
                # Mark the error as retrieved. Otherwise asyncio logs it if no other task waits.
                review.done.exception()
                raise
            self.audit(review.action, review.target, "done", _outcome(result))
            review.done.set_result(result)
            if self.has_env:
                self.env.watcher.refresh()
        # The cancellation of one request must not cancel the change for other requests.
        result = await asyncio.shield(review.done)
        values = {"action": review.action, "target": review.target, "result": _shown(result)}
        more = {"back": review.back, "sent": result if hasattr(result, "queue_offset") else None}
        return Page("done.html", _("Done: {action}", action=_(review.action)), values, more, command=review.command)

    async def _check_unchanged(self, review: Review) -> None:
        """Raise Fault if the subject has changed since the review."""
        if review.look is not None and (lines := difference(review.seen, await review.look())):
            why = _("{target}: {lines}: look at it again", target=review.target, lines=joined("; ", lines))
            raise Fault(409, _("Changed since you looked"), why)


def _shown(result: Any) -> Any:
    """Return the result of a change with the field names of JSON."""
    match result:
        case Struct():
            values = (getattr(result, name) for name in result.__struct_fields__)
            return dict(zip(result.__struct_encode_fields__, values, strict=True))
        case list():
            return [_shown(one) for one in result]
    return result


def _outcome(result: Any) -> str:
    if hasattr(result, "send_result"):
        return _(
            "{result} {id} on {broker}:{queue}@{offset}", result=result.send_result, id=result.msg_id,
            broker=result.broker_name, queue=result.queue_id, offset=result.queue_offset,
        )  # fmt: skip
    return getattr(result, "consume_result", "") or _("done")


View = Callable[[Ask], Awaitable[Page | Response]]


async def part(asking: Awaitable[Any]) -> Part:
    """Return a part of a page with its value or its error. An error does not affect other parts of the page."""
    try:
        return Part(await asking)
    except TimeoutError:
        return Part(None, _("no answer in time"))
    except RmqError as error:
        return Part(None, str(error))


def own_page(page: OwnPage, content: str | Markup, values: dict[str, Any] | None = None) -> Page:
    """Return a page in the console's frame. ``content`` is text, or HTML as ``Markup`` without styles or scripts.
    ``values`` is the content of the page as JSON."""
    return Page("own.html", page.title, {} if values is None else values, {"content": content}, live_s=page.live_s)


def rows_of(ask: Ask, rows: list[Any], total: int) -> Rows:
    """Return the rows of the requested page of a list."""
    pages = max(1, -(-len(rows) // ROWS))
    number = min(ask.number("page", 1, 1), pages)
    return Rows(
        rows=rows[(number - 1) * ROWS : number * ROWS], number=number, pages=pages, matched=len(rows), total=total
    )

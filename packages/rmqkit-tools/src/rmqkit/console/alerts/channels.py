"""The channels of alerts (a webhook, or any service of apprise), and the delivery of one notice.

=====================  =================================================================================================
address                notice
=====================  =================================================================================================
``http://``, https     a POST with the `Event` as JSON, and with its HMAC-SHA256 if there is a secret
any other              the text of the event through `apprise <https://appriseit.com>`_: ``mailto://``, ``slack://``, …
=====================  =================================================================================================

Both kinds block, so a delivery runs in a thread, for at most `ANSWER_S`. While a slower thread is still running, no
other notice is sent to its address. Redirects are not followed, because no admin has entered their address.

Addresses contain keys. Pages and logs show only the scheme, and the host of a webhook. The log lines of apprise and
urllib3 about a delivery are captured (`_Capture`). The text of an error contains no word of the address.
"""

from __future__ import annotations

import functools
import hmac
import http.client
import logging
import re
import ssl
import threading
from contextvars import ContextVar
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

import msgspec
from msgspec import Struct

from rmqkit.console.html.render import clean
from rmqkit.console.threads import in_thread
from rmqkit.sentences import _, plain

if TYPE_CHECKING:
    from apprise import NotifyBase

__all__ = ["NAME", "Channel", "Event", "deliver"]

ANSWER_S = 10.0
NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_NETWORK_FAULT = re.compile(r"\[(?:Errno -?\d+|SSL: \w+)\] ([\w ,-]+)|(Read timed out)")
_lines: ContextVar[list[tuple[int, str]] | None] = ContextVar("lines of the delivery of this thread", default=None)
_stuck: dict[str, threading.Event] = {}
"""The addresses with a delivery that took too long, and an event that is set when its thread ends. Use them only on the
event loop."""


class Channel(Struct, rename="camel", kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A destination for notices.

    Attributes:
        name: the name of the channel in rules.
        url: the ``http://`` or ``https://`` address of a webhook, or an address of apprise.
        secret: the key that signs the notices to a webhook; empty: no signature.
    """

    name: str
    url: str
    secret: str = ""

    @property
    def kind(self) -> str:
        """The type of the channel: ``webhook``, or the scheme of a service of apprise."""
        scheme = self.url.partition("://")[0].lower()
        return "webhook" if scheme in ("http", "https") else scheme

    @property
    def place(self) -> str:
        """The address without possible keys. The host in an address of apprise is often a key."""
        if self.kind != "webhook":
            return f"{self.kind}://…"
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.hostname}" + (f":{parts.port}" if parts.port else "") + "/…"

    def check(self) -> None:
        """Check the fields. Run this in a thread: a service of apprise needs a second of CPU.
        Raises ValueError: a field is not valid. The text names the field, and does not show the address."""
        if not NAME.fullmatch(self.name):
            raise ValueError(_("name {name!r} must be 1 to 64 letters, digits, dots, - and _", name=self.name))
        if len(self.url) > 2_000 or not self.url.isascii() or re.search(r"[\x00-\x20\x7f]", self.url):
            raise ValueError(_("the address must have at most 2,000 characters, and no blanks: write them as %20"))
        if self.kind == "webhook":
            self._check_webhook()
            return
        if self.secret:
            raise ValueError(_("only webhooks have a secret: other addresses carry their own"))
        _capture()
        lines: list[tuple[int, str]] = []
        entered = _lines.set(lines)
        try:
            _service(self.url)
        except ValueError:
            why = _cause(self, lines) or _("the scheme is unknown")
            raise ValueError(_("the address is neither http(s):// nor one of apprise: {why}", why=why)) from None
        finally:
            _lines.reset(entered)

    def _check_webhook(self) -> None:
        try:
            parts = urlsplit(self.url)
            is_good = bool(parts.hostname) and parts.port != 0 and "#" not in self.url
        except ValueError:
            is_good, parts = False, urlsplit("")
        if not is_good:
            raise ValueError(_("the address of a webhook must be http:// or https:// and a host, without #"))
        if parts.username is not None or parts.password is not None:
            raise ValueError(_("the address must have no user and password: put a key into the secret"))


class Event(Struct, rename="camel", kw_only=True):
    """One notice in the format for webhooks. ``state`` is ``firing``, ``resolved`` or ``test``. ``id`` is the id of the
    alert, so firing, resolved and all tries have the same id. ``page`` is the path of the page with details."""

    id: str
    state: str
    cluster: str
    rule: str
    figure: str
    target: str
    value: float | None
    operator: str
    limit: float
    fired_ms: int
    at_ms: int
    text: str
    page: str


async def deliver(channel: Channel, event: Event) -> str:
    """Send a notice once. Return the reason of a failure (without address and secret), or an empty text."""
    if channel.url in _stuck:
        if not _stuck[channel.url].is_set():
            return _("the delivery before has not ended: its service does not answer")
        del _stuck[channel.url]
    ended = threading.Event()

    def run() -> str:
        try:
            return _post(channel, event) if channel.kind == "webhook" else _notify(channel, event)
        finally:
            ended.set()

    try:
        return await in_thread(run, ANSWER_S)
    except TimeoutError:
        for url in [url for url, before in _stuck.items() if before.is_set()]:
            del _stuck[url]
        _stuck[channel.url] = ended
        return _("no answer within {seconds:g} s", seconds=ANSWER_S)


def _post(channel: Channel, event: Event) -> str:
    """Send an event to a webhook on a new connection."""
    parts = urlsplit(channel.url)
    body = msgspec.json.encode(event, enc_hook=plain)
    headers = {"content-type": "application/json", "user-agent": "rmqkit-console", "connection": "close"}
    headers["x-rmq-delivery"] = f"{event.id}-{event.state}"
    if channel.secret:
        headers["x-rmq-signature"] = "sha256=" + hmac.digest(channel.secret.encode(), body, "sha256").hex()
    host = parts.hostname or ""
    connection = (
        http.client.HTTPSConnection(host, parts.port, timeout=ANSWER_S, context=ssl.create_default_context())
        if parts.scheme == "https"
        else http.client.HTTPConnection(host, parts.port, timeout=ANSWER_S)
    )
    try:
        connection.request("POST", (parts.path or "/") + (f"?{parts.query}" if parts.query else ""), body, headers)
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        return _("cannot be reached: {reason}", reason=getattr(error, "strerror", None) or type(error).__name__)
    finally:
        connection.close()
    if 300 <= status < 400:
        return _("it answers {status}: redirects are not followed, give the address that it leads to", status=status)
    return "" if 200 <= status < 300 else _("it answers {status}", status=status)


# -- apprise


class _Capture(logging.Filter):
    """A filter that captures the lines of a logger about our deliveries, because they contain addresses and keys."""

    def __init__(self, name: str) -> None:
        super().__init__()
        logger = logging.getLogger(name)
        self._level = logger.getEffectiveLevel()
        logger.addFilter(self)
        logger.setLevel(logging.DEBUG)  # the reason of a network fault is logged at this level only

    def filter(self, record: logging.LogRecord) -> bool:
        lines = _lines.get()
        if lines is None:
            return record.levelno >= self._level
        lines.append((record.levelno, record.getMessage()))
        return False


@functools.cache
def _capture() -> list[_Capture]:
    return [_Capture(name) for name in ("apprise", "urllib3.connectionpool")]


def _service(url: str) -> NotifyBase:
    """Return the service for an address. Raises ValueError: apprise does not know or cannot use the address."""
    import apprise  # the import takes 0.3 s of CPU, the services a second

    asset = apprise.AppriseAsset(app_id="rmqkit", app_desc="rmqkit console", service_timeout=0)
    service = apprise.Apprise.instantiate(url, asset=asset)
    if not isinstance(service, apprise.NotifyBase):
        raise ValueError(url)
    service.redirects = False
    return service


def _notify(channel: Channel, event: Event) -> str:
    """Send a notice through apprise."""
    import apprise

    _capture()
    lines: list[tuple[int, str]] = []
    _lines.set(lines)  # only in this thread, which ends with the delivery
    kinds = {"firing": apprise.NotifyType.FAILURE, "resolved": apprise.NotifyType.SUCCESS}
    try:
        sending = apprise.Apprise()
        sending.add(_service(channel.url))
        title = f"{event.state.upper()} {event.rule}: {clean(event.target)}"
        kind = kinds.get(event.state, apprise.NotifyType.INFO)
        if sending.notify(event.text, title, kind, body_format=apprise.NotifyFormat.TEXT):
            return ""
    except Exception as error:  # noqa: BLE001 - the outer edge of a service's code
        lines.append((logging.ERROR, f"{type(error).__name__}: {error}"))
    return _cause(channel, lines) or _("apprise could not deliver it")


def _cause(channel: Channel, lines: list[tuple[int, str]]) -> str:
    """Return the first warning of apprise, with the reason of a network error and without words of the address."""
    text = next((line for level, line in lines if level >= logging.WARNING), "")
    fault = next((found for _level, line in reversed(lines) if (found := _NETWORK_FAULT.search(line))), None)
    address = channel.url.partition("://")[2]
    words = {word for word in re.split(r"[^\w.-]+", f"{address} {unquote(address)}") if len(word) > 2}
    if words:
        pattern = "|".join(re.escape(word) for word in sorted(words, key=len, reverse=True))
        text = re.sub(pattern, "…", text, flags=re.IGNORECASE)
    return clean(f"{text} ({fault[1] or fault[2]})" if fault is not None else text)[:300]

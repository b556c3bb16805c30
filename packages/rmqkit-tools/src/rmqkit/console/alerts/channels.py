"""Where alerts are sent: channels, what each kind of receiver gets, and one delivery.

A channel's address is outsiders' ground: one connection with `ANSWER_S` for all of it, no redirect is followed, at
most `ANSWER_BYTES` of an answer are read. Addresses carry keys, so people and logs see scheme and host alone; secrets
nobody.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import hmac
import json
import re
import ssl
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any, Protocol
from urllib.parse import urlencode, urlsplit

import h11
import msgspec
from msgspec import Struct

from rmqkit.console.html.render import clean
from rmqkit.sentences import _, plain

__all__ = ["NAME", "AlertChannel", "Channel", "Event", "deliver", "kinds"]

ANSWER_S, ANSWER_BYTES = 10.0, 64 << 10
NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


class Channel(Struct, rename="camel", kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Where notices go. ``kind``: ``webhook``, ``slack``, ``dingtalk``, ``feishu``, ``wecom``, or a plug-in's."""

    name: str
    kind: str = "webhook"
    url: str
    secret: str = ""

    def check(self) -> None:
        """Raises ValueError: a field cannot be used; its text says which, and not the address."""
        if not NAME.fullmatch(self.name):
            raise ValueError(_("name {name!r} must be 1 to 64 letters, digits, dots, - and _", name=self.name))
        if self.kind not in kinds():
            raise ValueError(_("kind {kind!r} must be one of {kinds}", kind=self.kind, kinds=", ".join(kinds())))
        try:
            parts = urlsplit(self.url)
            is_good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            is_good, parts = False, urlsplit("")
        if not is_good or len(self.url) > 2_000 or not self.url.isascii() or re.search(r"[\x00-\x20\x7f#]", self.url):
            raise ValueError(_("the address must be http:// or https://, a host, and no blanks or #"))
        if parts.username is not None or parts.password is not None:
            raise ValueError(_("the address must have no user and password: put a key into the secret"))

    @property
    def place(self) -> str:
        """The address without what may be a key."""
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.hostname}" + (f":{parts.port}" if parts.port else "") + "/…"


class Event(Struct, rename="camel", kw_only=True):
    """One notice, as webhooks get it; ``state`` is ``firing``, ``resolved`` or ``test``. ``id`` is the alert's: the
    same when it is resolved, and at each try. ``page`` is the path of the page that shows more."""

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


class AlertChannel(Protocol):
    """A plug-in's channel: ``alert_channel`` of what an entry point of the group ``rmqkit.console`` names."""

    kind: str

    async def send(self, event: Event, url: str, secret: str) -> None:
        """Deliver a notice, or raise: its error's text is shown, and it is tried again."""
        ...


# -- shapes: what each kind of receiver is sent


class Sent(Struct):
    """A request: its body, headers, and what its address gets behind the ``?``."""

    body: Any
    headers: dict[str, str] = {}
    query: dict[str, str] = {}


def _webhook(event: Event, secret: str, now_ms: int) -> Sent:
    return Sent(event, {"x-rmq-delivery": f"{event.id}-{event.state}"})


def _slack(event: Event, secret: str, now_ms: int) -> Sent:
    return Sent({"text": event.text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")})


def _dingtalk(event: Event, secret: str, now_ms: int) -> Sent:
    sent = Sent({"msgtype": "text", "text": {"content": event.text}})
    if secret:
        sign = hmac.digest(secret.encode(), f"{now_ms}\n{secret}".encode(), "sha256")
        sent.query = {"timestamp": str(now_ms), "sign": base64.b64encode(sign).decode()}
    return sent


def _feishu(event: Event, secret: str, now_ms: int) -> Sent:
    body: dict[str, Any] = {"msg_type": "text", "content": {"text": event.text}}
    if secret:
        # Feishu's own way: the text is the key, nothing is what is signed, and the time is in seconds, where DingTalk
        # has ms.
        sign = hmac.digest(f"{now_ms // 1000}\n{secret}".encode(), b"", "sha256")
        body |= {"timestamp": str(now_ms // 1000), "sign": base64.b64encode(sign).decode()}
    return Sent(body)


def _wecom(event: Event, secret: str, now_ms: int) -> Sent:
    return Sent({"msgtype": "text", "text": {"content": event.text}})


_SHAPES: dict[str, Callable[[Event, str, int], Sent]] = {
    "webhook": _webhook,
    "slack": _slack,
    "dingtalk": _dingtalk,
    "feishu": _feishu,
    "wecom": _wecom,
}


@functools.cache
def _plugins() -> dict[str, AlertChannel]:
    hooks = (point.load() for point in entry_points(group="rmqkit.console"))
    return {hook.alert_channel.kind: hook.alert_channel for hook in hooks if hasattr(hook, "alert_channel")}


def kinds() -> list[str]:
    """Kinds of channels that there are."""
    return [*_SHAPES, *_plugins()]


async def deliver(channel: Channel, event: Event, now_ms: int) -> str:
    """Send a notice once: why it was not taken, or empty. No text has the address or the secret in it."""
    try:
        async with asyncio.timeout(ANSWER_S):
            if channel.kind in _plugins():
                await _plugins()[channel.kind].send(event, channel.url, channel.secret)
                return ""
            sent = _SHAPES[channel.kind](event, channel.secret, now_ms)
            body = msgspec.json.encode(sent.body, enc_hook=plain)
            headers = {"content-type": "application/json", "user-agent": "rmqkit-console"} | sent.headers
            if channel.secret and channel.kind == "webhook":
                headers["x-rmq-signature"] = "sha256=" + hmac.digest(channel.secret.encode(), body, "sha256").hex()
            status, answer = await _post(channel.url, sent.query, headers, body)
    except TimeoutError:
        return _("no answer within {seconds:g} s", seconds=ANSWER_S)
    except (OSError, h11.ProtocolError) as error:
        return _("cannot be reached: {getattr}", getattr=getattr(error, "strerror", None) or type(error).__name__)
    except Exception as error:  # noqa: BLE001 - a plug-in's: the text of its error is what people need
        return clean(f"{type(error).__name__}: {error}".replace(channel.url, "…").replace(channel.secret or "\0", "…"))
    if 300 <= status < 400:
        return _("it answers {status}: redirects are not followed, give the address that it leads to", status=status)
    if not 200 <= status < 300:
        return _("it answers {status}", status=status)
    return _refusal(answer)


async def _post(url: str, query: dict[str, str], headers: dict[str, str], body: bytes) -> tuple[int, bytes]:
    """One request on a connection of its own; status, and the beginning of the answer."""
    parts = urlsplit(url)
    is_tls, host = parts.scheme == "https", parts.hostname or ""
    behind = "&".join(filter(None, (parts.query, urlencode(query))))
    target = (parts.path or "/") + (f"?{behind}" if behind else "")
    all_headers = {"host": parts.netloc, "content-length": str(len(body)), "connection": "close"} | headers
    context = ssl.create_default_context() if is_tls else None
    reader, writer = await asyncio.open_connection(host, parts.port or (443 if is_tls else 80), ssl=context)
    try:
        connection = h11.Connection(h11.CLIENT)
        for event in (
            h11.Request(method="POST", target=target, headers=list(all_headers.items())),
            h11.Data(body),
            h11.EndOfMessage(),
        ):
            writer.write(connection.send(event) or b"")
        status, answer = 0, bytearray()
        while len(answer) < ANSWER_BYTES:
            match connection.next_event():
                case h11.NEED_DATA:
                    connection.receive_data(await reader.read(65_536))
                case h11.Response(status_code=status):
                    pass
                case h11.Data(data=data):
                    answer += data
                case h11.EndOfMessage() | h11.ConnectionClosed() | h11.PAUSED:
                    break
        return status, bytes(answer[:ANSWER_BYTES])
    finally:
        writer.transport.abort()  # a farewell of TLS would be waited for


def _refusal(answer: bytes) -> str:
    """Robots answer 200 and say in JSON that they did not take it."""
    try:
        told = json.loads(answer)
    except ValueError:
        return ""
    if not isinstance(told, dict):
        return ""
    code = next((told[key] for key in ("errcode", "code", "StatusCode") if told.get(key) not in (None, 0, "0")), None)
    text = str(told.get("errmsg") or told.get("msg") or "")[:200]
    return "" if code is None else clean(_("it refuses: {code} {text}", code=code, text=text).strip())[:300]

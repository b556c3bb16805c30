"""The rules that check every snapshot, and the notices that they send.

A rule has a *figure*, a *selector* of names (``billing-*``), an *operator*, a *value*, and a number *n* of consecutive
*samples*. While there are rules, the watcher takes a sample every 10 s.

=========  =====================================  ====================================================================
state      figure over the limit                  figure not over the limit
=========  =====================================  ====================================================================
OK         pending; firing if n is 1              –
pending    firing at the n-th sample in a row     OK
firing     –                                      resolved at the n-th sample in a row: OK
=========  =====================================  ====================================================================

An unknown figure changes nothing. Only the figure ``gone`` grows while a broker does not answer. If no broker reports
the figure of an alert for an hour (a deleted group), the alert is resolved with this reason. A silent rule sends no
notice. After the silence, it sends notices of the alerts that still fire. An alert has the same id from firing to
resolved, across restarts and tries.

A *channel* gets its notices in order. A notice has 5 tries; the pauses (`remoting.client.Backoff`) add up to 7 to 15
minutes. Then the notice is dropped, and the page shows this. Rules, alerts and waiting notices are in one file, which
only its owner can read (`store.files.JsonFile`). The file is saved before a notice is sent. So after a kill the notice
is sent, perhaps again with the same id.

Use this module only on the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import fnmatch
import hashlib
import logging
import math
import operator
import re
from collections import deque
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import quote

import msgspec
from msgspec import Struct, field

from rmqkit.admin.diagnosis.health import Snapshot
from rmqkit.clock import Clock
from rmqkit.console.alerts.channels import NAME, Channel, Event, deliver
from rmqkit.console.html.render import clean
from rmqkit.console.watch.figures import FIGURES, values_of
from rmqkit.errors import RmqError, SettingsError
from rmqkit.remoting.client import Backoff
from rmqkit.sentences import _, plain
from rmqkit.store.files import JsonFile

__all__ = ["Alert", "Alerts", "Rule"]

RULES_MAX, CHANNELS_MAX, ALERTS_MAX = 500, 50, 10_000
WAITING_MAX, EVENTS_MAX = 1_000, 500
TRIES, FIRST_PAUSE_MS, PAUSE_MS_MAX = 5, 60_000, 480_000
HOUR_MS = 3_600_000
SEEN_MS = 7 * 24 * HOUR_MS
OPERATORS: dict[str, Callable[[float, float], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}
_OWNER_ALONE = 0o600
_log = logging.getLogger(__name__)


class Rule(Struct, rename="camel", kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A rule for a figure. If ``channel`` is empty, no notices are sent, and only the page shows the alerts."""

    name: str
    figure: str
    selector: str = "*"
    operator: str = ">"
    value: float
    samples: int = 3
    channel: str = ""
    silent_until_ms: int = 0

    def check(self, channels: Mapping[str, Channel]) -> None:
        """Check the fields. Raises ValueError: a field is not valid. The text names the field."""
        if not NAME.fullmatch(self.name):
            raise ValueError(_("name {name!r} must be 1 to 64 letters, digits, dots, - and _", name=self.name))
        if self.figure not in FIGURES:
            why = _("figure {figure!r} must be one of {figures}", figure=self.figure, figures=", ".join(FIGURES))
            raise ValueError(why)
        if self.operator not in OPERATORS:
            raise ValueError(
                _(
                    "operator {operator!r} must be one of {operators}",
                    operator=self.operator,
                    operators=" ".join(OPERATORS),
                )
            )
        if not 0 < len(self.selector) <= 255:
            raise ValueError(_("the selector must have 1 to 255 characters: * for all"))
        if not math.isfinite(self.value) or not 1 <= self.samples <= 360:
            raise ValueError(
                _(
                    "value {value} must be a number, samples {samples} from 1 to 360",
                    value=self.value,
                    samples=self.samples,
                )
            )
        if self.channel and self.channel not in channels:
            raise ValueError(
                _(
                    "channel {channel!r} is none of {channels}",
                    channel=self.channel,
                    channels=", ".join(channels) or _("those there are"),
                )
            )

    @property
    def words(self) -> str:
        """The rule as text for the user."""
        return _(
            "{figure} of {selector} {operator} {show}",
            figure=self.figure,
            selector=self.selector,
            operator=self.operator,
            show=FIGURES[self.figure].show(self.value),
        )


class Alert(Struct, rename="camel", kw_only=True):
    """An alert: a figure that is over the limit of a rule.

    Attributes:
        state: ``pending`` or ``firing``.
        count: the number of consecutive samples that lead to the next state.
        is_notified: True if the notice of the firing alert was sent or waits to be sent.
    """

    rule: str
    target: str
    value: float
    since_ms: int
    seen_ms: int
    state: str = "pending"
    id: str = ""
    fired_ms: int = 0
    count: int = 1
    is_notified: bool = False


class Waiting(Struct, rename="camel", kw_only=True):
    """A notice that is not delivered yet."""

    channel: str
    event: Event
    tries: int = 0
    trouble: str = ""


class Happened(Struct, rename="camel", kw_only=True):
    """One line in the list of past events."""

    at_ms: int
    what: str
    rule: str
    target: str
    text: str


class _Kept(Struct, rename="camel", kw_only=True, omit_defaults=True):
    """The content of the file that stores the state."""

    channels: list[Channel] = field(default_factory=list)
    rules: list[Rule] = field(default_factory=list)
    alerts: list[Alert] = field(default_factory=list)
    waiting: list[Waiting] = field(default_factory=list)
    seen: dict[str, int] = field(default_factory=dict)
    happened: list[Happened] = field(default_factory=list)


class _Given(Struct, forbid_unknown_fields=True):
    """The content of a file of rules that a user has written."""

    channels: list[Channel] = field(default_factory=list)
    rules: list[Rule] = field(default_factory=list)


class Alerts:
    """The rules of one cluster, its alerts, and its waiting notices.

    Attributes:
        rules, channels: the rules and the channels by name.
        alerts: the pending and firing alerts, by rule and target.
        lost: the reason why the stored rules could not be loaded, or empty.
        trouble: the reason why changes could not be saved, or empty.
    """

    def __init__(self, cluster: str, path: Path | None, clock: Clock) -> None:
        self.rules: dict[str, Rule] = {}
        self.channels: dict[str, Channel] = {}
        self.alerts: dict[tuple[str, str], Alert] = {}
        self.waiting: deque[Waiting] = deque()
        self.happened: deque[Happened] = deque(maxlen=EVENTS_MAX)
        self.lost = self.trouble = ""
        self._cluster = cluster
        self._clock = clock
        self._seen: dict[str, int] = {}
        self._dead: dict[str, deque[tuple[int, int]]] = {}
        self._matches: dict[str, re.Pattern[str]] = {}
        self._file = None if path is None else JsonFile(path, mode=_OWNER_ALONE)
        self._saving = asyncio.Lock()
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._senders: dict[str, asyncio.Task[None]] = {}
        self._load()

    @property
    def is_needed(self) -> bool:
        return bool(self.rules)

    @property
    def is_in_memory(self) -> bool:
        return self._file is None

    # -- life

    def _load(self) -> None:
        if self._file is None:
            return
        try:
            kept = self._file.load(_Kept) or _Kept()
        except RmqError as error:
            self._file.set_aside()
            self.lost = _("{error}: they were renamed to …damaged, and there are no rules now", error=error)
            _log.warning("%s", self.lost)
            return
        self.rules = {one.name: one for one in kept.rules if one.figure in FIGURES and one.operator in OPERATORS}
        self.channels = {one.name: one for one in kept.channels}
        self.alerts = {(one.rule, one.target): one for one in kept.alerts if one.rule in self.rules}
        self.waiting.extend(kept.waiting[-WAITING_MAX:])
        self.happened.extend(kept.happened)
        self._seen = kept.seen

    def take(self, path: Path) -> None:
        """Add the rules and channels of a file. They replace rules and channels with the same names.
        Raises SettingsError: the file cannot be read, or a rule or channel is not valid."""
        try:
            found = msgspec.json.decode(path.read_bytes(), type=_Given)
            channels = self.channels | {one.name: one for one in found.channels}
            for channel in found.channels:
                channel.check()
            for rule in found.rules:
                rule.check(channels)
        except (OSError, ValueError) as error:
            raise SettingsError(f"--rules {path}: {getattr(error, 'strerror', None) or error}") from None
        self.channels = channels
        self.rules |= {one.name: one for one in found.rules}

    def start(self) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="console alerts")
            self._wake.set()

    async def close(self) -> None:
        """Stop the sending of notices, and save the file. Waiting notices are sent after the next start."""
        tasks = [one for one in (self._task, *self._senders.values()) if one is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._task is not None:
            await self.save()

    async def _run(self) -> None:
        """Save changes, then start to send the waiting notices, in a loop."""
        while True:
            await self._wake.wait()
            # Clear the event before the save, because a change during the save must set it again.
            self._wake.clear()
            await self.save()
            for name in {one.channel for one in self.waiting}:
                if name not in self._senders or self._senders[name].done():
                    self._senders[name] = asyncio.create_task(self._send(name), name=f"console alerts to {name}")

    async def save(self) -> None:
        """Save the file. After a failure, set ``trouble``."""
        if self._file is None:
            return
        kept = _Kept(
            channels=list(self.channels.values()),
            rules=list(self.rules.values()),
            alerts=list(self.alerts.values()),
            waiting=list(self.waiting),
            seen=self._seen,
            happened=list(self.happened)[-200:],
        )
        async with self._saving:
            try:
                await asyncio.to_thread(self._file.save, msgspec.to_builtins(kept, enc_hook=plain))
                self.trouble = ""
            except RmqError as error:
                self.trouble = str(error)
                _log.warning("alerts are not kept: %s", error)

    # -- changes by users

    async def put_rule(self, rule: Rule) -> None:
        """Add or replace a rule. Raises ValueError: the rule is not valid, or there are too many."""
        rule.check(self.channels)
        if rule.name not in self.rules and len(self.rules) >= RULES_MAX:
            raise ValueError(_("there are {most} rules: delete one first", most=RULES_MAX))
        self.rules[rule.name] = rule
        self._matches.pop(rule.name, None)
        await self.save()

    async def delete_rule(self, name: str) -> None:
        """Delete a rule and resolve its alerts."""
        rule = self.rules.pop(name)
        for alert in [one for one in self.alerts.values() if one.rule == name]:
            self._resolve(rule, alert, self._clock.now_ms(), _("the rule was deleted"))
        await self.save()
        self._wake.set()

    async def put_channel(self, channel: Channel) -> None:
        """Add or replace a channel. Raises ValueError: the channel is not valid, or there are too many."""
        await asyncio.to_thread(channel.check)
        if channel.name not in self.channels and len(self.channels) >= CHANNELS_MAX:
            raise ValueError(_("there are {most} channels: delete one first", most=CHANNELS_MAX))
        self.channels[channel.name] = channel
        await self.save()

    async def delete_channel(self, name: str) -> None:
        """Delete a channel. Raises ValueError: a rule uses it."""
        if used := [one.name for one in self.rules.values() if one.channel == name]:
            raise ValueError(_("channel {name} is used by {used}: change them first", name=name, used=", ".join(used)))
        del self.channels[name]
        await self.save()

    async def test(self, name: str) -> str:
        """Send a test notice once. Return the reason of a failure, or an empty text."""
        now_ms = self._clock.now_ms()
        rule = Rule(name="test", figure="lag", value=0.0)
        event = self._event(rule, Alert(rule="test", target="test", value=0.0, since_ms=0, seen_ms=0), "test", now_ms)
        event.text = _("A test of channel {name} by the console of cluster {cluster}", name=name, cluster=self._cluster)
        return await deliver(self.channels[name], event)

    # -- snapshots

    def look(self, snapshot: Snapshot) -> None:
        """Apply every rule to a snapshot."""
        at_ms = snapshot.at_ms
        values: dict[str, dict[str, float | None]] = {"gone": self._gone(snapshot), "growth": self._growth(snapshot)}
        if not self.rules:
            return
        for figure, name, value in values_of(snapshot):
            values.setdefault(figure, {})[name] = value
        for rule in self.rules.values():
            self._judge(rule, values.get(rule.figure, {}), at_ms)
        for alert in list(self.alerts.values()):
            self._settle(self.rules[alert.rule], alert, at_ms)

    def _gone(self, snapshot: Snapshot) -> dict[str, float | None]:
        """Return the seconds since the last answer of each broker. Brokers that left the name servers are included."""
        for state in snapshot.brokers:
            label = state.row.broker_name if state.is_master else f"{state.row.broker_name}:{state.row.broker_id}"
            if not state.trouble:
                self._seen[label] = snapshot.at_ms
            else:
                self._seen.setdefault(label, state.since_ms or snapshot.at_ms)
        self._seen = {label: ms for label, ms in self._seen.items() if snapshot.at_ms - ms < SEEN_MS}
        return {label: (snapshot.at_ms - ms) / 1000 for label, ms in self._seen.items()}

    def _growth(self, snapshot: Snapshot) -> dict[str, float | None]:
        """Return the growth of dead letters in the last hour, by group. A count is stored once a minute."""
        found: dict[str, float | None] = {}
        for group in snapshot.groups.values():
            if group.dead_grew is None:
                found[group.name] = None
                continue
            counts = self._dead.setdefault(group.name, deque())
            if not counts or snapshot.at_ms - counts[-1][0] >= 60_000:
                counts.append((snapshot.at_ms, group.dead_grew))
            while len(counts) > 1 and counts[1][0] <= snapshot.at_ms - HOUR_MS:
                counts.popleft()
            found[group.name] = group.dead_grew - counts[0][1]
        self._dead = {name: counts for name, counts in self._dead.items() if name in found}
        return found

    def _judge(self, rule: Rule, values: Mapping[str, float | None], at_ms: int) -> None:
        is_over, matches = OPERATORS[rule.operator], self._pattern(rule).match
        for name, value in values.items():
            alert = self.alerts.get((rule.name, name))
            if value is None:
                if alert is not None:
                    alert.seen_ms = at_ms
            elif alert is not None:
                if matches(name):
                    self._step(rule, alert, value, at_ms, is_over=is_over(value, rule.value))
            elif is_over(value, rule.value) and matches(name) and len(self.alerts) < ALERTS_MAX:
                alert = Alert(rule=rule.name, target=name, value=value, since_ms=at_ms, seen_ms=at_ms, count=0)
                self.alerts[rule.name, name] = alert
                self._step(rule, alert, value, at_ms, is_over=True)

    def _settle(self, rule: Rule, alert: Alert, at_ms: int) -> None:
        """Resolve an alert if its rule no longer matches, or its figure is old. Otherwise send a due notice."""
        if not self._pattern(rule).match(alert.target):
            self._resolve(rule, alert, at_ms, _("the rule no longer looks at it"))
        elif at_ms - alert.seen_ms > HOUR_MS:
            self._resolve(rule, alert, at_ms, _("no broker has reported it for an hour"))
        elif alert.state == "firing" and not alert.is_notified and rule.silent_until_ms <= at_ms:
            alert.is_notified = True
            self._tell(rule, self._event(rule, alert, "firing", at_ms))

    def _pattern(self, rule: Rule) -> re.Pattern[str]:
        if rule.name not in self._matches:
            self._matches[rule.name] = re.compile(fnmatch.translate(rule.selector))
        return self._matches[rule.name]

    def _step(self, rule: Rule, alert: Alert, value: float, at_ms: int, *, is_over: bool) -> None:
        """Move an alert to its next state (see the table of this module)."""
        alert.value, alert.seen_ms = value, at_ms
        match alert.state, is_over:
            case "pending", True:
                alert.count += 1
                if alert.count >= rule.samples:
                    alert.state, alert.count, alert.fired_ms = "firing", 0, at_ms
                    place = "\0".join((self._cluster, rule.name, alert.target, str(at_ms)))
                    alert.id = hashlib.sha256(place.encode()).hexdigest()[:32]
                    self._note("firing", rule.name, alert.target, self._event(rule, alert, "firing", at_ms).text)
            case "pending", False:
                del self.alerts[rule.name, alert.target]
            case "firing", True:
                alert.count = 0
            case "firing", False:
                alert.count += 1
                if alert.count >= rule.samples:
                    self._resolve(rule, alert, at_ms, "")

    def _resolve(self, rule: Rule, alert: Alert, at_ms: int, why: str) -> None:
        del self.alerts[alert.rule, alert.target]
        if alert.state != "firing":
            return
        event = self._event(rule, alert, "resolved", at_ms)
        if why:
            event.value, event.text = None, _("{text} ({why})", text=event.text, why=why)
        self._note("resolved", rule.name, alert.target, event.text)
        if alert.is_notified:
            self._tell(rule, event)

    def _event(self, rule: Rule, alert: Alert, state: str, at_ms: int) -> Event:
        known = FIGURES[rule.figure]
        about = {"name": rule.name, "title": known.title, "of": _(known.of), "target": clean(alert.target)}
        about |= {"value": known.show(alert.value), "operator": rule.operator, "limit": known.show(rule.value)}
        text = _("{name}: {title} of {of} {target} is {value} (limit {operator} {limit})", **about)
        if state == "firing":
            at = f"{datetime.fromtimestamp(alert.fired_ms / 1000, UTC):%Y-%m-%d %H:%M:%S}"
            text = _("FIRING {alert} in cluster {cluster} since {at} UTC", alert=text, cluster=self._cluster, at=at)
        elif state == "resolved":
            text = _("RESOLVED {alert} in cluster {cluster}", alert=text, cluster=self._cluster)
        else:
            text = f"{state.upper()} {text} in cluster {self._cluster}"
        page = "/".join(quote(one, safe="") for one in (self._cluster, f"{known.of}s", alert.target.partition("@")[0]))
        return Event(
            id=alert.id, state=state, cluster=self._cluster, rule=rule.name, figure=rule.figure, target=alert.target,
            value=alert.value, operator=rule.operator, limit=rule.value, fired_ms=alert.fired_ms, at_ms=at_ms,
            text=text, page=f"/{page}",
        )  # fmt: skip

    # -- notices

    def _tell(self, rule: Rule, event: Event) -> None:
        if rule.channel:
            self.waiting.append(Waiting(channel=rule.channel, event=event))
            if len(self.waiting) > WAITING_MAX:
                lost = self.waiting.popleft()
                self._note(
                    "lost", lost.event.rule, lost.event.target, _("{most:,} other notices wait", most=WAITING_MAX)
                )
        self._wake.set()

    def _note(self, what: str, rule: str, target: str, text: str) -> None:
        self.happened.append(Happened(at_ms=self._clock.now_ms(), what=what, rule=rule, target=target, text=text))
        self._wake.set()

    async def _send(self, name: str) -> None:
        """Deliver the waiting notices of a channel, in order."""
        while (waiting := next((one for one in self.waiting if one.channel == name), None)) is not None:
            backoff = Backoff(FIRST_PAUSE_MS, PAUSE_MS_MAX)
            while True:
                channel = self.channels.get(name)
                if channel is None:
                    waiting.trouble, waiting.tries = _("the channel was deleted"), TRIES
                else:
                    waiting.trouble = await deliver(channel, waiting.event)
                    waiting.tries += 1
                if not waiting.trouble or waiting.tries >= TRIES:
                    break
                _log.warning("alert %s is not delivered to channel %s: %s", waiting.event.id, name, waiting.trouble)
                self._wake.set()
                await asyncio.sleep(backoff.next_ms() / 1000)
            with contextlib.suppress(ValueError):
                self.waiting.remove(waiting)
            event = waiting.event
            if waiting.trouble:
                text = _(
                    "channel {name} did not accept it in {tries} tries: {trouble}",
                    name=name,
                    tries=waiting.tries,
                    trouble=waiting.trouble,
                )
                self._note(_("given up"), event.rule, event.target, text)
            else:
                self._note(
                    "delivered", event.rule, event.target, _("{state}, to channel {name}", state=event.state, name=name)
                )

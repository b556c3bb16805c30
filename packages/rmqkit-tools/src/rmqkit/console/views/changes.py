"""The pages that change topics, groups, offsets, and the settings of brokers and name servers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
from msgspec import Struct

from rmqkit.admin.cluster.groups import END_MS, QueueMove
from rmqkit.admin.cluster.settings import config_rows, described
from rmqkit.console.access.confirmations import Review
from rmqkit.console.html.render import shell
from rmqkit.console.request.forms import Field, Form, change, chosen_brokers, flag, number, pairs, where
from rmqkit.console.request.request import Ask, Page, part
from rmqkit.console.views.brokers import state_of
from rmqkit.errors import SettingsError
from rmqkit.protocol.names import group_fault, topic_fault
from rmqkit.protocol.schemas.groups import GroupRetryPolicy, SubscriptionGroupConfig
from rmqkit.protocol.schemas.topics import TopicConfig
from rmqkit.sentences import _, joined
from rmqkit.settings import SECRET

_PERMISSIONS = {"6": _("read, write"), "4": _("read only"), "2": _("write only"), "0": _("none")}
_TYPES = ("", "NORMAL", "FIFO", "DELAY", "TRANSACTION", "MIXED", "LITE")
_UNIT, _UNIT_SUB = 1, 2
_SECRET_WORDS = ("secret", "password", "credential", "initauthenticationuser")


def _settings_at_brokers(configs: Mapping[str, Struct]) -> dict[str, str]:
    """Return the settings of a topic or group at each broker, as names and texts to compare."""
    return {
        _("{name} at {broker}", name=row.name, broker=broker): text
        for row in config_rows(configs)
        for broker, text in row.values.items()
    }


def _differences(former: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [
        (name.replace("_", " "), _("{before} → {after}", before=former.get(name, _("none")), after=value))
        for name, value in wanted.items()
        if former.get(name) != value
    ]


# -- topics


async def new_topic(ask: Ask) -> Page:
    """Create a topic."""
    form = Form(
        title=_("New topic"),
        action=_("create topic"),
        target=ask.form.get("name", "").strip(),
        fields=[
            Field(name="name", label=_("Name"), hint=_("letters, digits, - _ % and |, at most 127 characters")),
            where(ask, hint=_("each broker gets so many queues")),
            *_topic_fields(TopicConfig(read_queue_nums=8, write_queue_nums=8)),
        ],
        back=ask.link("topics"),
        command="rmq topic create TOPIC",
        crumbs=ask.crumbs("topics"),
    )

    async def plan(given: dict[str, str]) -> Review:
        if fault := topic_fault(given["name"]):
            raise ValueError(fault)
        return await _topic_review(ask, given["name"], given, {}, form)

    return await change(ask, form, plan)


async def edit_topic(ask: Ask) -> Page:
    """Edit a topic."""
    name = ask.params["t"]
    configs = await ask.admin.topics.config(name)
    differs = ", ".join(row.name for row in config_rows(configs) if row.differs)
    form = Form(
        title=_("Edit {name}", name=name),
        action=_("edit topic"),
        target=name,
        fields=[where(ask, list(configs)), *_topic_fields(next(iter(configs.values())))],
        hint=_(
            "The brokers differ in {differs}: the fields have the values of {client}.",
            differs=differs,
            client=next(iter(configs)),
        )
        if differs
        else "",
        back=ask.link("topics", name),
        command=shell("rmq topic create", name),
        crumbs=ask.crumbs("topics", name),
    )

    async def plan(given: dict[str, str]) -> Review:
        return await _topic_review(ask, name, given, configs, form)

    return await change(ask, form, plan)


def _topic_fields(config: TopicConfig) -> list[Field]:
    attributes = dict(config.attributes or {})
    kind = attributes.pop("message.type", "")
    lines = "\n".join(f"{name}={value}" for name, value in attributes.items())
    labels = _PERMISSIONS | {str(config.perm): _PERMISSIONS.get(str(config.perm), str(config.perm))}
    return [
        Field(name="write", label=_("Queues to write"), kind="number", value=str(config.write_queue_nums)),
        Field(
            name="read", label=_("Queues to read"), kind="number", value=str(config.read_queue_nums),
            hint=_("to have fewer queues, lower those to write first, and these when the rest is consumed"),
        ),
        Field(
            name="perm", label=_("Permission"), kind="choice", value=str(config.perm), choices=tuple(labels),
            labels=labels,
        ),
        Field(
            name="type", label=_("Message type"), kind="choice", value=kind,
            choices=tuple(dict.fromkeys((*_TYPES, kind))),
            labels={"": _("not set")}, hint=_("what gRPC clients may send to it"),
        ),
        flag("order", _("Ordered"), config.order, _("name servers return its queues even while a broker is away")),
        Field(name="attributes", label=_("Attributes, name=value, one a line"), kind="area", value=lines),
    ]  # fmt: skip


# Long: it makes one review: the form's values, the changes, the requests.
async def _topic_review(
    ask: Ask, name: str, given: dict[str, str], configs: Mapping[str, TopicConfig], form: Form
) -> Review:
    admin = ask.admin
    brokers = chosen_brokers(ask, given, list(configs))
    if not configs and name in await admin.calls.topic_names():
        raise ValueError(_("topic {name} is there already: edit it", name=name))
    attributes = pairs(given["attributes"], "attribute") | (
        {"message.type": given["type"]} if given["type"] and given["type"] in _TYPES else {}
    )
    if given["perm"] not in (*_PERMISSIONS, *(str(one.perm) for one in configs.values())):
        why = _(
            "permission {given} must be one of {permissions}", given=given["perm"], permissions=", ".join(_PERMISSIONS)
        )
        raise ValueError(why)
    wanted: dict[str, Any] = {
        "write_queue_nums": number(given, "write", _("queues to write"), 0),
        "read_queue_nums": number(given, "read", _("queues to read"), 0),
        "perm": int(given["perm"]),
        "order": given["order"] == "yes",
        "attributes": attributes,
    }
    rows = [(_("Topic"), name), (_("Brokers"), ", ".join(brokers))]
    for broker in brokers:
        former = msgspec.structs.asdict(configs[broker]) if broker in configs else {}
        changed = _differences(former, wanted)
        rows += [
            (_("{key} at {broker}", key=key, broker=broker) if len(brokers) > 1 else key, text) for key, text in changed
        ]
        if configs and not changed and len(brokers) == 1:
            raise ValueError(_("nothing is changed: {name} is like that at {broker}", name=name, broker=broker))

    async def run() -> list[Any]:
        done: list[Any] = []
        for broker in brokers:
            known = configs.get(broker, TopicConfig())
            gone = [key for key in known.attributes or {} if key not in attributes]
            changes = [*(f"+{key}={value}" for key, value in attributes.items()), *(f"-{key}" for key in gone)]
            done += await admin.topics.create(
                name,
                broker=broker,
                read_queues=wanted["read_queue_nums"],
                write_queues=wanted["write_queue_nums"],
                perm=wanted["perm"],
                order=wanted["order"],
                unit=bool(known.topic_sys_flag & _UNIT),
                unit_sub=bool(known.topic_sys_flag & _UNIT_SUB),
                attributes=",".join(changes) or None,
            )
        return done

    async def look() -> dict[str, str]:
        found = await part(admin.topics.config(name))
        return _settings_at_brokers(found.value or {})

    return Review(
        target=name, rows=rows,
        requests=[_("UPDATE_AND_CREATE_TOPIC (17) to {broker}", broker=broker) for broker in brokers],
        command=shell("rmq topic create", name, "-r", wanted["read_queue_nums"], "-w", wanted["write_queue_nums"]),
        back=ask.link("topics", name), run=run, look=look, seen=_settings_at_brokers(configs),
    )  # fmt: skip


async def delete_topic(ask: Ask) -> Page:
    """Delete a topic with all its messages."""
    name, admin = ask.params["t"], ask.admin
    configs = await admin.topics.config(name)
    status = await part(admin.topics.status(name))
    readers = await part(admin.topics.groups(name))
    stored = sum(one.max_offset - one.min_offset for one in status.value.queues) if status.value else None
    about = [
        (_("Topic"), name),
        (_("Brokers"), ", ".join(configs)),
        (_("Stored"), status.trouble if stored is None else _("{stored:,} messages", stored=stored)),
        (_("Groups"), readers.trouble or ", ".join(readers.value) or _("none reads it")),
    ]
    requests = [_("DELETE_TOPIC_IN_BROKER (215) to {configs}", configs=", ".join(configs))]
    requests.append("DELETE_TOPIC_IN_NAMESRV (216)")

    async def run() -> list[Any]:
        clusters = await admin.topics.clusters(name)
        return [done for cluster in clusters for done in await admin.topics.delete(name, cluster)]

    return await _deleted(
        ask, "topics", name, _("delete topic"), about, shell("rmq topic delete", name), requests, run,
        admin.topics.config, _("its messages can no longer be read; a send to it fails, or creates it again"),
    )  # fmt: skip


async def _deleted(
    ask: Ask, place: str, name: str, action: str, about: list[tuple[str, str]], command: str, requests: list[str],
    run: Callable[[], Awaitable[list[Any]]], configs: Callable[[str], Awaitable[Mapping[str, Struct]]], warning: str,
) -> Page:  # fmt: skip
    """Return the form that deletes a topic or a group with its data. The user must type the name."""
    form = Form(
        title=_("Delete {name}", name=name), action=action, target=name, fields=[], about=about, warning=warning,
        back=ask.link(place, name), command=command, crumbs=ask.crumbs(place, name),
    )  # fmt: skip

    async def look() -> dict[str, str]:
        return _settings_at_brokers(await configs(name))

    async def plan(given: dict[str, str]) -> Review:
        seen = await look()
        return Review(about, requests, run, back=ask.link(place), look=look, seen=seen, typed=name)

    return await change(ask, form, plan)


# -- groups

_GROUP_FIELDS: dict[str, tuple[str, str]] = {
    "consume_enable": (_("May consume"), _("no: brokers refuse its pulls")),
    "retry_max_times": (_("Retries"), _("how often a message is tried again before it is a dead letter")),
    "retry_queue_nums": (_("Queues of the retry topic"), _("at each broker")),
    "consume_from_min_enable": (_("May start at the first message"), _("of a queue in which it has no offset")),
    "consume_broadcast_enable": (_("May broadcast"), _("every member gets every message")),
    "consume_message_orderly": (_("In order"), _("one message of a queue at a time, for members that pop")),
    "notify_consumer_ids_changed_enable": (_("Notify members of changes"), _("when one joins or leaves")),
    "consume_timeout_minute": (_("Handler may take, minutes"), _("kept by brokers; clients have a limit of their own")),
    "broker_id": (_("Read from broker id"), _("0 is the master")),
    "which_broker_when_consume_slowly": (_("Read from when far behind"), _("broker id: 1 is the first slave")),
}  # fmt: skip


async def new_group(ask: Ask) -> Page:
    """Create a group."""
    return await _group(ask, "", {}, _("New group"), ask.link("groups"))


async def edit_group(ask: Ask) -> Page:
    """Edit a group."""
    name = ask.params["g"]
    configs = await ask.admin.groups.configs(name)
    return await _group(ask, name, configs, _("Edit {name}", name=name), ask.link("groups", name))


# Long: one form and its review.
async def _group(ask: Ask, known: str, configs: Mapping[str, SubscriptionGroupConfig], title: str, back: str) -> Page:
    admin = ask.admin
    shown = next(iter(configs.values()), SubscriptionGroupConfig())
    policy = msgspec.json.encode(shown.group_retry_policy).decode()
    lines = "\n".join(f"{name}={value}" for name, value in (shown.attributes or {}).items())
    differs = ", ".join(row.name for row in config_rows(configs) if row.differs)
    fields = [where(ask)]
    if not known:
        fields.insert(
            0, Field(name="name", label=_("Name"), hint=_("letters, digits, - _ % and |, at most 120 characters"))
        )
    for name, (label, hint) in _GROUP_FIELDS.items():
        value = getattr(shown, name)
        made = flag(name, label, value, hint) if isinstance(value, bool) else None
        fields.append(made or Field(name=name, label=label, kind="number", value=str(value), hint=hint))
    fields += [
        Field(
            name="group_retry_policy", label=_("Pauses between retries, as JSON"), kind="area", value=policy,
            hint=_("brokers send them to proxies; the brokers' own pauses are those of the delay levels"),
        ),
        Field(name="attributes", label=_("Attributes, name=value, one a line"), kind="area", value=lines),
    ]  # fmt: skip
    form = Form(
        title=title,
        action=_("edit group") if known else _("create group"),
        target=known or ask.form.get("name", "").strip(),
        fields=fields,
        hint=_(
            "The brokers differ in {differs}: the fields have the values of {client}.",
            differs=differs,
            client=next(iter(configs)),
        )
        if differs
        else "",
        back=back,
        command=shell("rmq group create", known or "GROUP"),
        crumbs=ask.crumbs("groups", *([known] if known else [])),
    )

    async def plan(given: dict[str, str]) -> Review:
        name = known or given["name"]
        if fault := group_fault(name):
            raise ValueError(fault)
        brokers = chosen_brokers(ask, given)
        tables = await admin.groups.tables()
        found = {broker: tables[broker][name] for broker in tables if name in tables[broker]}
        if not known and found:
            raise ValueError(_("group {name} is there already: edit it", name=name))
        wanted = _group_changes(given, shown)
        former = {one: getattr(shown, one) for one in wanted} if known else {}
        rows = [(_("Group"), name), (_("Brokers"), ", ".join(brokers))]
        rows += _differences(former | ({"attributes": {}} if "attributes" in wanted else {}), wanted)
        if known and not wanted and not differs:
            raise ValueError(_("nothing is changed: {name} is like that", name=name))

        async def run() -> list[Any]:
            for broker in brokers:
                await admin.groups.update(name, wanted, broker)
            return [_("group {name} set at {broker}", name=name, broker=broker) for broker in brokers]

        async def look() -> dict[str, str]:
            tables = await admin.groups.tables()
            return _settings_at_brokers({broker: table[name] for broker, table in tables.items() if name in table})

        return Review(
            target=name, rows=rows,
            requests=[_("UPDATE_AND_CREATE_SUBSCRIPTIONGROUP (200) to {broker}", broker=broker) for broker in brokers],
            command=shell("rmq group create", name), back=ask.link("groups", name), run=run, look=look,
            seen=_settings_at_brokers(found),
        )  # fmt: skip

    return await change(ask, form, plan)


def _group_changes(given: Mapping[str, str], shown: SubscriptionGroupConfig) -> dict[str, Any]:
    """Return the changed fields of a group's configuration. Raises ValueError: a field is not valid."""
    wanted: dict[str, Any] = {}
    for name, (label, __) in _GROUP_FIELDS.items():
        former = getattr(shown, name)
        value = given[name] == "yes" if isinstance(former, bool) else number(given, name, label.lower(), -1)
        if value != former:
            wanted[name] = value
    try:
        policy = msgspec.json.decode(given["group_retry_policy"] or "{}", type=GroupRetryPolicy)
    except msgspec.MsgspecError as error:
        raise ValueError(_("pauses between retries: {error}", error=error)) from None
    if policy != shown.group_retry_policy:
        wanted["group_retry_policy"] = policy
    attributes, former = pairs(given["attributes"], "attribute"), shown.attributes or {}
    changed = {f"+{name}": value for name, value in attributes.items() if former.get(name) != value}
    changed |= {f"-{name}": "" for name in former if name not in attributes}
    return wanted | ({"attributes": changed} if changed else {})


async def delete_group(ask: Ask) -> Page:
    """Delete a group with its offsets, retries and dead letters."""
    name, admin = ask.params["g"], ask.admin
    configs = await admin.groups.configs(name)
    state = ask.snapshot.groups.get(name)
    unknown = "unknown"
    about = [
        (_("Group"), name),
        (_("Brokers"), ", ".join(configs)),
        (_("Members online"), unknown if state is None or state.members is None else str(state.members)),
        (_("Behind"), unknown if state is None or state.lag is None else _("{lag:,} messages", lag=state.lag)),
        (_("Dead letters"), unknown if state is None or state.dead is None else f"{state.dead:,}"),
    ]
    requests = [
        _("DELETE_SUBSCRIPTIONGROUP (207) to {configs}", configs=", ".join(configs)),
        _("DELETE_TOPIC_IN_BROKER (215) and DELETE_TOPIC_IN_NAMESRV (216) for its retries and dead letters"),
    ]

    async def run() -> list[Any]:
        clusters = sorted({one.row.cluster_name for one in ask.snapshot.brokers if one.row.broker_name in configs})
        for cluster in clusters:
            await admin.groups.delete(name, cluster=cluster)
        return [_("group {name} deleted at {broker}", name=name, broker=broker) for broker in configs]

    return await _deleted(
        ask, "groups", name, _("delete group"), about, shell("rmq group delete", name), requests, run,
        admin.groups.configs,
        _("its offsets, its retry topic and its dead letters go with it; a consumer that starts makes a new one"),
    )  # fmt: skip


# -- offsets

_MOVES = {
    "time": _("to what was stored at or after a time"),
    "end": _("to the end: skip everything that is there"),
    "place": _("one queue to an offset"),
    "clone": _("to where another group is"),
}


# Long: one form and its review.
async def offsets(ask: Ask) -> Page:
    """Move the offsets of a group on a topic. The review shows the move in each queue."""
    name, admin = ask.params["g"], ask.admin
    topics = sorted({lag.topic for lag in ask.snapshot.lags if lag.group == name})
    form = Form(
        title=_("Move {name}", name=name),
        action=_("move offsets"),
        target=name,
        fields=[
            Field(
                name="topic", label=_("Topic"), value=ask.text("topic") or next(iter(topics), ""), choices=topics
            ),
            Field(name="to", label=_("Move"), kind="choice", value="time", choices=tuple(_MOVES), labels=_MOVES),
            Field(name="time", label=_("Time (UTC)"), kind="datetime-local", hint=_("for a move to a time")),
            Field(name="queue", label=_("Broker and queue"), hint=_("for one queue: broker-a:3")),
            Field(name="offset", label=_("Offset"), kind="number", hint=_("for one queue")),
            Field(name="source", label=_("Other group"), hint=_("for a move to where another group is")),
        ],
        hint=_("It works whether members are online or not. Members continue from there. The next page shows "
"each queue first."),
        back=ask.link("groups", name),
        command=shell("rmq offset reset", name, "TOPIC", "-s", "TIME", "--dry-run"),
        crumbs=ask.crumbs("groups", name),
    )  # fmt: skip

    async def plan(given: dict[str, str]) -> Review:
        topic = given["topic"]
        if not topic:
            raise ValueError(_("name a topic that the group reads"))
        how, what = _move(given)
        source = how.pop("source", None)

        async def preview() -> list[QueueMove]:
            return await admin.offsets.preview(name, topic, source=source, **how)

        moves = await preview()
        skipped, again = sum(one.skipped for one in moves), sum(one.again for one in moves)
        if not skipped and not again and all(one.now == one.then for one in moves):
            raise ValueError(_("nothing is moved: the group is there in every queue"))

        def compared(found: Sequence[QueueMove]) -> dict[str, str]:
            # Members consume during the review, so compare only the targets, and if any message is skipped.
            places = {} if given["to"] in ("end", "clone") else {
                f"{one.broker_name}:{one.queue_id}": str(one.then) for one in found
            }  # fmt: skip
            return places | {"skips": _("yes") if any(one.skipped for one in found) else _("no")}

        async def look() -> dict[str, str]:
            return compared(await preview())

        async def run() -> list[Any]:
            if source is not None:
                return list(await admin.offsets.clone(source, name, topic))
            return list(await admin.offsets.reset(name, topic, **how))

        brokers = sorted({one.broker_name for one in moves})
        asked = "UPDATE_CONSUMER_OFFSET (15)" if source is not None else "INVOKE_BROKER_TO_RESET_OFFSET (222)"
        at = ("-b", how["broker"], "-q", how["queue_id"], "-o", how["offset"]) if "broker" in how else ()
        command = shell("rmq offset reset", name, topic, "-s", how.get("timestamp_ms"), *at)
        if source is not None:
            command = shell("rmq offset clone", source, name, topic)
        return Review(
            rows=[
                (_("Group"), name), (_("Topic"), topic), (_("Move"), what),
                (_("Skipped"), _("{skipped:,} messages", skipped=skipped)),
                  (_("Again"), _("{again:,} messages", again=again))],
            requests=[_("{request} to {broker}", request=asked, broker=broker) for broker in brokers],
            command=command, run=run, look=look, seen=compared(moves), moves=moves, typed=name if skipped else "",
            warning=_("{skipped:,} messages will not be consumed by {name}", skipped=skipped, name=name)
            if skipped else "",
        )  # fmt: skip

    return await change(ask, form, plan)


def _move(given: Mapping[str, str]) -> tuple[dict[str, Any], str]:
    """Return the arguments of the move, and a description. Raises ValueError: a field is missing or not valid."""
    match given["to"]:
        case "end":
            return {"timestamp_ms": END_MS}, _("to the end of each queue")
        case "time":
            at_ms = time_of(given["time"], "time")
            if at_ms is None:
                raise ValueError(_("give the time to move to"))
            return {"timestamp_ms": at_ms}, _(
                "to the first message stored at or after {given} UTC", given=given["time"]
            )
        case "place":
            broker, __, queue = given["queue"].rpartition(":")
            if not broker or not queue.isdecimal():
                why = _(
                    "queue {given} must be broker:number, such as broker-a:3", given=given["queue"] or _("is empty: it")
                )
                raise ValueError(why)
            offset = number(given, "offset", "offset")
            what = _("queue {queue} of {broker} to offset {offset:,}", queue=queue, broker=broker, offset=offset)
            return {"timestamp_ms": END_MS, "broker": broker, "queue_id": int(queue), "offset": offset}, what
        case "clone":
            if not given["source"]:
                raise ValueError(_("name the other group"))
            return {"source": given["source"]}, _("to where {given} is", given=given["source"])
    raise ValueError(_("move {given} must be one of {moves}", given=given["to"], moves=", ".join(_MOVES)))


def time_of(text: str, label: str) -> int | None:
    """Return a time (by default UTC) in ms since the epoch; None for no text. Raises ValueError: it is not a time."""
    if not text:
        return None
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(_("{label} {text} must be like 2026-01-31T12:00 (UTC)", label=_(label), text=text)) from None
    return round((at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() * 1000)


# -- settings


async def broker_settings(ask: Ask) -> Page:
    """Change settings of a broker. The review shows their current values."""
    state = state_of(ask)
    address, name = state.row.addr, ask.params["b"]
    back = ask.link("brokers", name, "settings")

    async def config() -> dict[str, str]:
        return (await ask.admin.brokers.config(address))[address]

    crumbs = [*ask.crumbs("brokers", name), (_("Settings"), back)]
    command = shell("rmq broker config-set -b", address, "KEY", "VALUE")
    return await _settings(
        ask, name, config, lambda changes: ask.admin.brokers.update_config(changes, address),
        "UPDATE_BROKER_CONFIG (25)", back, crumbs, command,
    )  # fmt: skip


async def name_server_settings(ask: Ask) -> Page:
    """Change settings of all name servers."""
    first = ask.admin.calls.name_servers[0]

    async def config() -> dict[str, str]:
        return (await ask.admin.name_servers.config())[first]

    back = ask.link("name-servers")
    return await _settings(
        ask, _("name servers"), config, ask.admin.name_servers.update_config, "UPDATE_NAMESRV_CONFIG (318)", back,
        [(_("Name servers"), back)], "rmq namesrv config-set KEY VALUE",
    )  # fmt: skip


async def _settings(
    ask: Ask, target: str, config: Any, put: Any, request: str, back: str, crumbs: list[tuple[str, str]], command: str
) -> Page:
    known = await config()
    rows = {row.key: row for row in described(known)}
    key = ask.text("key")
    meaning = _(rows[key].help) if key in rows and rows[key].help else _("not in the tables of rmqkit")
    prefilled = f"{key}={'' if rows[key].secret else rows[key].value}" if key in rows else ""
    form = Form(
        title=_("Change settings of {target}", target=target), action=_("change settings"), target=target,
        back=back, crumbs=crumbs,
        command=command,
        fields=[Field(name="settings", label=_("Settings, key=value, one a line"), kind="area", value=prefilled)],
        about=[(key, joined("; ", (meaning, rows[key].bounds or _("any value"))))]
        if key in rows else [],
        hint=_("Settings that you do not name stay as they are. The broker refuses values that it does not accept."),
    )  # fmt: skip

    async def plan(given: dict[str, str]) -> Review:
        wanted = pairs(given["settings"], "setting")
        if not wanted:
            raise ValueError(_("give at least one setting, as key=value"))
        shown, careful, secret = [(_("Where"), target)], [], set[str]()
        for name, value in wanted.items():
            row = rows.get(name)
            if row is None:
                raise SettingsError(_("{target} has no setting {name}: look at its list", target=target, name=name))
            if row.secret or any(word in name.lower() for word in _SECRET_WORDS):
                secret.add(name)
            after = SECRET if name in secret else value or _("empty")
            shown.append((name, _("{before} → {after}", before=row.value or _("empty"), after=after)))
            if row.is_known and not row.hot:
                careful.append(_("{name} takes effect at the next start", name=name))
        if all(known[name] == value for name, value in wanted.items()):
            raise ValueError(_("nothing is changed: the settings have these values"))

        def compared(now: Mapping[str, str]) -> dict[str, str]:
            # Compare only the hash of a secret, because a page and the audit may show the difference.
            return {name: str(hash(now.get(name))) if name in secret else now.get(name, "") for name in wanted}

        async def look() -> dict[str, str]:
            return compared(await config())

        async def run() -> list[str]:
            await put(wanted)
            return [f"{name} = {SECRET if name in secret else value}" for name, value in wanted.items()]

        return Review(
            rows=shown, requests=[_("{request} with {wanted}", request=request, wanted=", ".join(wanted))], run=run,
            look=look, seen=compared(known), warning=joined("; ", careful),
        )  # fmt: skip

    return await change(ask, form, plan)

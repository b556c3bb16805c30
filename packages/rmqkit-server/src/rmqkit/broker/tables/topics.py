"""The broker's topic table (``TopicConfigManager``), kept in ``config/topics.json``.

A change is written to disk before anybody hears of it; then the broker registers it with the name servers. Changes
by operators share a write, in a thread, and a row's text is made once. What a send or the broker itself creates, once
in the life of a topic, the loop waits for. Only the retry topic that a group gets with its first heartbeat is written
with the others of that second: after a crash the next heartbeat makes it again.

Static topics have queues numbered over the whole topic, of which each broker has some (``TopicQueueMappingManager``):

===================  ===============================================================================================
number of a queue    is
===================  ===============================================================================================
global               its number in the topic, which clients know and requests carry
local                its number among the queues on this broker, by which the store and offsets know it
===================  ===============================================================================================

Requests with a global number are answered for the local queue, one for a queue that is elsewhere with
NOT_LEADER_FOR_QUEUE. Kept in ``config/topicQueueMapping.json``, registered with the topics, copied by slaves. Not here:
queues that moved from one broker to another, whose offsets continue over both; such mappings are refused, and a file
that holds one is not opened.
Loop only. Source: behaviour.md §2.8, §3.2; remoting.md §4.6.2, §6.4; store.md §9.2.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, field

from rmqkit.broker.settings import BrokerSettings
from rmqkit.broker.tables.files import Changes, SharedWrite
from rmqkit.clock import Clock
from rmqkit.errors import StoreMismatch, StoreUnavailable
from rmqkit.protocol import names
from rmqkit.protocol.schemas.topics import (
    DataVersion,
    Permission,
    TopicConfig,
    TopicConfigTable,
    TopicQueueMappingDetail,
    TopicQueueMappingInfo,
)
from rmqkit.store.files import JsonFile, RowTexts
from rmqkit.store.queues.table import queue_counts


class _Stored(Struct, rename="camel"):
    data_version: DataVersion = field(default_factory=DataVersion)
    topic_queue_mapping_info_map: dict[str, TopicQueueMappingDetail] = field(default_factory=dict)


class StaticTopics:
    """The static topics of one broker.

    Attributes:
        local: topic → global number → local number, of the queues that are here.
    """

    def __init__(self, folder: Path, settings: BrokerSettings, clock: Clock) -> None:
        self.file = JsonFile(folder / "topicQueueMapping.json")
        self._settings = settings
        self._clock = clock
        self._stored = _Stored()
        self.local: dict[str, dict[int, int]] = {}

    def load(self) -> None:
        """Read the file. Raises StoreMismatch: it holds what is not supported, and nothing was changed."""
        self._stored = self.file.load(_Stored) or _Stored()
        for topic, detail in self._stored.topic_queue_mapping_info_map.items():
            if reason := self._unsupported(detail):
                raise StoreMismatch(f"{self.file.path}: topic {topic}: {reason}")
            self.local[topic] = _local(detail)

    @property
    def data_version(self) -> DataVersion:
        return self._stored.data_version

    @property
    def details(self) -> dict[str, TopicQueueMappingDetail]:
        """Return the mapping details of all static topics, to be read only."""
        return self._stored.topic_queue_mapping_info_map

    def infos(self, topics: list[str] | None = None) -> dict[str, TopicQueueMappingInfo]:
        """The mappings to register with name servers, of all or some topics."""
        return {
            topic: TopicQueueMappingInfo(
                bname=detail.bname,
                curr_id_map=self.local[topic],
                dirty=detail.dirty,
                epoch=detail.epoch,
                scope=detail.scope,
                topic=topic,
                total_queues=detail.total_queues,
            )
            for topic, detail in self.details.items()
            if topics is None or topic in topics
        }

    def fault(self, detail: TopicQueueMappingDetail, *, force: bool) -> str:
        """Why a mapping is not taken, or an empty text."""
        known = self.details.get(detail.topic)
        # Two operators may remap at a time: the one who read the older mapping has the smaller epoch.
        if known is not None and not force:
            if detail.epoch < known.epoch:
                return f"Can't accept data with small epoch {detail.epoch} < {known.epoch}"
            if detail.scope != known.scope:
                return f"Can't accept data with unmatched scope {detail.scope} != {known.scope}"
        return self._unsupported(detail)

    def _unsupported(self, detail: TopicQueueMappingDetail) -> str:
        own = self._settings.broker_name
        if detail.bname != own:
            return f"a mapping for broker {detail.bname} was given to broker {own}"
        moved = next(
            (
                number
                for number, items in detail.hosted_queues.items()
                if len(items) != 1 or items[0].bname != own or items[0].logic_offset or items[0].start_offset
            ),
            None,
        )
        if moved is not None:
            return f"queue {moved} has been on another broker: rmqkit does not move queues of static topics"
        return ""

    def put(self, detail: TopicQueueMappingDetail) -> None:
        """Create or change a static topic; it is on the disk when this returns."""
        self._save(self.details | {detail.topic: detail})

    def remove(self, topic: str) -> None:
        """Forget a topic; an unknown one is fine."""
        if topic in self.details:
            self._save({name: detail for name, detail in self.details.items() if name != topic})

    def replace_with(self, copied: TopicConfigTable) -> bool:
        """Become the static topics of the master, unless it has none or their version is the own one.
        Returns whether they were others; on the disk then.
        Raises StoreMismatch: one of them is not supported; nothing was changed."""
        version, details = copied.mapping_data_version, copied.topic_queue_mapping_detail_map
        if not isinstance(version, DataVersion) or not isinstance(details, dict) or version == self.data_version:
            return False
        # All are looked at before one is kept: half a table of the master would carry its version, and stay half.
        for topic, detail in details.items():
            if reason := self._unsupported(detail):
                raise StoreMismatch(f"static topics of the master: topic {topic}: {reason}")
        self._keep(_Stored(version, details))
        return True

    def _save(self, details: dict[str, TopicQueueMappingDetail]) -> None:
        version = msgspec.structs.replace(self.data_version)
        version.advance(self._clock.now_ms())
        self._keep(_Stored(version, details))

    def _keep(self, stored: _Stored) -> None:
        self.file.save(stored)
        self._stored = stored
        self.local = {topic: _local(detail) for topic, detail in self.details.items()}

    def here(self, topic: str, number: int) -> int | None:
        """The local number of a queue by its global one, of any queue by a negative one; None when it is elsewhere."""
        local = self.local[topic]
        return local.get(number) if number >= 0 else next(iter(local.values()), None)

    def everywhere(self, topic: str, queue_id: int) -> int:
        """The global number of a queue by its local one; the same for topics that are not static."""
        if topic not in self.local:
            return queue_id
        numbers = self.local[topic]
        return next((number for number, local in numbers.items() if local == queue_id), queue_id)


def _local(detail: TopicQueueMappingDetail) -> dict[int, int]:
    return {number: items[-1].queue_id for number, items in sorted(detail.hosted_queues.items())}


_log = logging.getLogger(__name__)
_LOGGED_MAX = 20
_ALL = Permission.READ | Permission.WRITE
_TEMPLATE = _ALL | Permission.INHERIT


class TopicTable:
    """Topics by name. ``on_change``: called with topics that were created or changed, after they are on disk.
    ``has_light``: whether every name of a light queue is a topic with one queue, which no table holds.
    ``file``: where the table is stored."""

    def __init__(
        self,
        folder: Path,
        settings: BrokerSettings,
        clock: Clock,
        on_change: Callable[[list[TopicConfig]], None],
        *,
        has_light: bool = False,
    ) -> None:
        self._has_light = has_light
        self.file = JsonFile(folder / "topics.json")
        self._store_root = folder.parent
        self._settings = settings
        self._clock = clock
        self._on_change = on_change
        self._table: dict[str, TopicConfig] = {}
        self._own: frozenset[str] = frozenset()
        self._rows = RowTexts()
        self._shared = SharedWrite(self.file, self._write_shared)
        self.static = StaticTopics(folder, settings, clock)
        self.data_version = DataVersion()

    def load(self) -> None:
        """Read the file and add the system topics that are missing. Where it is lost, also with a backup that may be
        older, the topics of the store's queues are added, too: their messages could not be read otherwise."""
        self.static.load()
        stored = self._read()
        if stored is not None:
            self._table = stored.topic_config_table
            self.data_version = stored.data_version
        _name_all(self._table)
        missing = self._missing_system_topics()
        if missing:
            self._table.update((config.topic_name, config) for config in missing)
            self.data_version.advance(self._clock.now_ms())
        # Not for an empty table: a broker whose topics were all deleted has old queues, too, until retention is done.
        if not self.file.path.exists():
            self._add_those_of_queues()

    def _read(self) -> TopicConfigTable | None:
        try:
            return self.file.load(TopicConfigTable)
        except StoreMismatch as error:
            _log.warning(
                "%s; both are kept as *.damaged, and the topics are created from the queues of the store", error
            )
            self.file.set_aside()
            return None

    def _add_those_of_queues(self) -> None:
        added: dict[str, TopicConfig] = {}
        for topic, (count, is_batch) in queue_counts(self._store_root).items():
            if topic not in self._table and not names.is_light(topic):
                attributes = {"queue.type": "BatchCQ"} if is_batch else {}
                added[topic] = TopicConfig(topic, count, count, _ALL, attributes=attributes)
        if added:
            self._table.update(added)
            self.data_version.advance(self._clock.now_ms())
            shown = ", ".join(f"{name} ({one.read_queue_nums})" for name, one in list(added.items())[:_LOGGED_MAX])
            _log.warning(
                "%s is lost: %d topics are taken from the store's queues, readable and writable, with as many queues "
                "as had messages: %s%s: check them with `rmq topic list`",
                *(self.file.path, len(added), shown, ", …" if len(added) > _LOGGED_MAX else ""),
            )

    def add_system_topics(self) -> None:
        """Create the system topics that the settings ask for by now."""
        if missing := self._missing_system_topics():
            self.put(*missing)

    def register_all(self) -> None:
        """Register all topics with the name servers again, as changed ones."""
        self.put(*self._table.values())  # with a new version: name servers do not look at one that they have

    def _missing_system_topics(self) -> list[TopicConfig]:
        system = _system_topics(self._settings)
        self._own = frozenset(config.topic_name for config in system)
        return [config for config in system if config.topic_name not in self._table]

    def __len__(self) -> int:
        return len(self._table)

    def get(self, topic: str) -> TopicConfig | None:
        config = self._table.get(topic)
        if config is None and self._has_light and names.is_light(topic):
            return TopicConfig(topic, 1, 1, _ALL)
        return config

    def is_batch_topic(self, topic: str) -> bool:
        config = self._table.get(topic)
        return config is not None and config.is_batch_queue

    def snapshot(self, topics: list[TopicConfig] | None = None) -> TopicConfigTable:
        """All topics, or some as they are now, with the version of the table, as it is registered."""
        table = self._table
        if topics is not None:
            names_of = dict.fromkeys(config.topic_name for config in topics)
            table = {name: table[name] for name in names_of if name in table}
        registered = TopicConfigTable(data_version=self.data_version, topic_config_table=dict(table))
        if self.static.local:
            registered.mapping_data_version = self.static.data_version
            registered.topic_queue_mapping_info_map = self.static.infos(None if topics is None else list(table))
        return registered

    def is_system(self, topic: str) -> bool:
        """Return True if a topic is the broker's own: clients neither create nor delete it."""
        return topic in self._own or names.is_system_topic(topic)

    @property
    def system_topics(self) -> list[str]:
        """The topics for which `is_system` holds, as far as they have names."""
        return sorted(self._own | names.SYSTEM_TOPICS | {topic for topic in self._table if self.is_system(topic)})

    def put(self, *configs: TopicConfig) -> None:
        """Create or change topics; they are on the disk when this returns, and unchanged when it raises."""
        assert all(config.topic_name for config in configs), "a topic is kept and registered by its name"
        self._replace(self._table | {config.topic_name: config for config in configs})
        # Only now: a producer that finds a topic at a name server would be refused here after a crash.
        self._on_change(list(configs))

    async def put_shared(self, *configs: TopicConfig) -> None:
        """Like `put`, in one write with all that is put so before it begins: all of it fails when that does."""
        # Seen here at once, so that two changes that come together see each other; registered when the write is done.
        self._table = self._shared.changed(self._table, {config.topic_name: config for config in configs})
        await self._shared.done()

    async def ensure_shared(self, topic: str, queue_count: int) -> None:
        """Make a topic that the broker itself needs, readable and writable, with `put_shared`.
        Raises StoreUnavailable: the disk refused, and the topic does not exist."""
        if topic not in self._table:
            sys_flag = _sys_flag(topic, unit=False)
            await self.put_shared(TopicConfig(topic, queue_count, queue_count, _ALL, topic_sys_flag=sys_flag))

    async def _write_shared(self, changes: Changes[TopicConfig]) -> None:
        """The version is a new one only in the end: other changes registered meanwhile must not use it up."""
        known, version = self.data_version, self._next_version()
        try:
            await self._shared.save_aside(self._content(version, self._table))
        except StoreUnavailable:
            self._table = self._shared.taken_back(self._table, changes)
            raise
        if self.data_version is not known:  # others used it up, with their own
            version, self._shared.is_due = self._next_version(), True
        assert version != known, "a table that changed has another version, or nobody would take it over"
        self.data_version = version
        self._on_change([config for _, config in changes.values()])

    def remove(self, topic: str) -> None:
        """Forget a topic; an unknown one is fine. Name servers keep it until they are sent its deletion."""
        self.static.remove(topic)
        if topic in self._table:
            self._replace({name: config for name, config in self._table.items() if name != topic})

    def replace_with(self, copied: TopicConfigTable) -> bool:
        """Become the master's table unless its version is the own one; topics it does not have are gone.
        Returns whether it was another; on the disk then. Source: behaviour.md §10.1.
        Raises StoreMismatch: static topics are not copied, as one of them is not supported."""
        is_other = copied.data_version != self.data_version
        if is_other:
            _name_all(copied.topic_config_table)
            self._shared.save(self._content(copied.data_version, copied.topic_config_table))
            self._table, self.data_version = copied.topic_config_table, copied.data_version
        return self.static.replace_with(copied) or is_other

    def mark_ordered(self, topics: Iterable[str]) -> None:
        """Mark those of some topics as ordered that the broker has.
        A mark stays when the name servers no longer list the topic, as with 5.x brokers (checked with 5.4.0)."""
        known = filter(None, map(self._table.get, topics))
        changed = [msgspec.structs.replace(config, order=True) for config in known if not config.order]
        if changed:
            self.put(*changed)

    def persist(self) -> None:
        self._shared.save(self._content(self.data_version, self._table))

    def _content(self, version: DataVersion, table: dict[str, TopicConfig]) -> Callable[[], dict[str, Any]]:
        """Return a function that makes the file's content from the table as it is now."""
        # Copied on the loop: `_change_soon` changes the table in place while a thread writes it.
        table = dict(table)
        return lambda: {"dataVersion": version, "topicConfigTable": self._rows.of(table)}

    async def write_new(self) -> None:
        """Write the table if it was changed without that, in a thread; to be called every second."""
        if self._shared.is_due:
            await self._shared.save_aside(self._content(self.data_version, self._table))

    def _next_version(self) -> DataVersion:
        version = msgspec.structs.replace(self.data_version)
        version.advance(self._clock.now_ms())
        return version

    def _replace(self, table: dict[str, TopicConfig]) -> None:
        version = self._next_version()
        self._shared.save(self._content(version, table))  # first: when the disk refuses, nothing has changed
        self._table, self.data_version = table, version

    def _change_soon(self, topic: str, config: TopicConfig | None) -> None:
        """Add or remove one topic, in constant time; `write_new` writes it with the others of that second."""
        if config is None:
            del self._table[topic]
        else:
            self._table[topic] = config
        self.data_version = self._next_version()
        self._shared.is_due = True

    def create_for_send(self, topic: str, *, template: str, queue_count: int, unit: bool = False) -> TopicConfig | None:
        """The topic a message is sent to, made from the template topic the producer names if that lets it.
        Returns None when the topic does not exist and must not be created."""
        known = self._table.get(topic)
        if known is not None:
            return known
        # As the reference: any topic with the INHERIT bit may be a template, and retry topics need none.
        default = self._table.get(template)
        allowed = default is not None and default.perm & Permission.INHERIT
        if template == names.AUTO_CREATE_TOPIC and not self._settings.auto_create_topic:
            allowed = False
        if default is not None and allowed:
            count = max(0, min(queue_count, default.write_queue_nums))
            perm = default.perm & ~Permission.INHERIT
            created = TopicConfig(topic, count, count, perm, default.topic_filter_type, _sys_flag(topic, unit=unit))
        elif topic.startswith(names.RETRY_PREFIX):
            created = TopicConfig(topic, 1, 1, _ALL)
        else:
            return None
        self.put(created)
        return created

    def ensure(
        self, topic: str, queue_count: int, *, order: bool = False, unit: bool = False, soon: bool = False
    ) -> TopicConfig:
        """A topic the broker itself needs, readable and writable; with ``soon`` it is written by `write_new`."""
        known = self._table.get(topic)
        if known is not None:
            return known
        sys_flag = _sys_flag(topic, unit=unit)
        created = TopicConfig(topic, queue_count, queue_count, _ALL, topic_sys_flag=sys_flag, order=order)
        if soon:
            # Name servers hear of it before it is on the disk: what a crash forgets is made again when it is needed.
            self._change_soon(topic, created)
        else:
            self._replace(self._table | {topic: created})
        assert self._table[topic] is created, "what is registered is in the table"
        self._on_change([created])
        return created

    def remove_unused(self, topic: str, made: TopicConfig) -> None:
        """Forget a topic that `ensure` made and nobody changed since; `write_new` writes that. Any other stays."""
        if self._table.get(topic) is made:  # the same object: an equal one may be what an operator made of it
            self._change_soon(topic, None)


def _name_all(table: dict[str, TopicConfig]) -> None:
    for name, config in table.items():
        config.topic_name = config.topic_name or name


def _system_topics(settings: BrokerSettings) -> list[TopicConfig]:
    """The topics a broker has from the start."""
    cluster, broker = settings.cluster_name, settings.broker_name
    topics = [
        _system(names.SELF_TEST_TOPIC, 1),
        _system(names.BENCHMARK_TOPIC, 1024),
        _system(cluster, 16, _TEMPLATE if settings.cluster_topic else Permission.INHERIT),
        _system(broker, 1, _TEMPLATE if settings.broker_topic else Permission.INHERIT),
        _system(names.OFFSET_MOVED_EVENT, 1),
        _system(names.SCHEDULE_TOPIC, 18),
        _system(f"{cluster}_REPLY_TOPIC", 1),
        _system(f"rmq_sys_REVIVE_LOG_{cluster}", settings.revive_queue_count),
        _system(names.SYNC_BROKER_MEMBER_PREFIX + broker, 1, Permission.INHERIT),
        _system(names.HALF_TOPIC, 1),
        _system(names.OP_HALF_TOPIC, 1),
        _system(names.TIMER_TOPIC, 1),
    ]
    if settings.auto_create_topic:
        topics.append(_system(names.AUTO_CREATE_TOPIC, settings.default_topic_queue_count, _TEMPLATE))
    if settings.trace_topic:
        topics.append(_system(settings.trace_topic_name, 1))
    return topics


def _sys_flag(topic: str, *, unit: bool) -> int:
    """UNIT, for a retry topic UNIT_SUB."""
    # Bits of Apache's TopicSysFlag, which name servers list topics by (codes 311 to 313).
    return (2 if topic.startswith(names.RETRY_PREFIX) else 1) if unit else 0


def _system(name: str, queues: int, perm: int = _ALL) -> TopicConfig:
    return TopicConfig(name, queues, queues, int(perm))

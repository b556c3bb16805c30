"""The broker's topic table (``TopicConfigManager``), stored in ``config/topics.json``.

A change is on the disk before the broker answers: it is appended to the table's journal (`JournaledTable`). Then the
broker registers the change with the name servers. The cost of a change does not depend on the number of topics. Changes
by operators share a write in a thread. For topics that a send or the broker itself creates, the loop waits for the
write. Retry topics that are created with a group's first heartbeat are an exception: they are written once a second,
and after a crash the next heartbeat creates them again.

The queues of a static topic are numbered over all brokers. Each broker has some of them (``TopicQueueMappingManager``):

===================  ===============================================================================================
number of a queue    meaning
===================  ===============================================================================================
global               its number in the topic, which clients and requests use
local                its number on this broker, which the store and the offsets use
===================  ===============================================================================================

The answer to a request with a global number is for the local queue, or NOT_LEADER_FOR_QUEUE if the queue is on another
broker. The mappings are stored in ``config/topicQueueMapping.json``, registered with the topics, and copied by slaves.
Queues that moved from one broker to another, with offsets that continue over both, are not supported. The broker
refuses such a mapping, and does not open a file that contains such a mapping.
Use this module only on the event loop. Source: behaviour.md §2.8, §3.2; remoting.md §4.6.2, §6.4; store.md §9.2.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
from msgspec import Struct, field

from rmqkit.broker.settings import BrokerSettings
from rmqkit.broker.tables.files import JournaledTable
from rmqkit.clock import Clock
from rmqkit.errors import StoreMismatch
from rmqkit.protocol import names
from rmqkit.protocol.schemas.topics import (
    DataVersion,
    Permission,
    TopicConfig,
    TopicConfigTable,
    TopicQueueMappingDetail,
    TopicQueueMappingInfo,
)
from rmqkit.store.files import JsonFile
from rmqkit.store.queues.table import queue_counts
from rmqkit.system import disk


class _Stored(Struct, rename="camel"):
    data_version: DataVersion = field(default_factory=DataVersion)
    topic_queue_mapping_info_map: dict[str, TopicQueueMappingDetail] = field(default_factory=dict)


class StaticTopics:
    """The static topics of one broker.

    Attributes:
        local: the queues on this broker: topic → global number → local number.
    """

    def __init__(self, folder: Path, settings: BrokerSettings, clock: Clock) -> None:
        self.file = JsonFile(folder / "topicQueueMapping.json")
        self._settings = settings
        self._clock = clock
        self._stored = _Stored()
        self.local: dict[str, dict[int, int]] = {}

    def load(self) -> None:
        """Read the file. Raises StoreMismatch: a mapping is not supported. The file is unchanged."""
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
        """The mapping details of all static topics, read-only."""
        return self._stored.topic_queue_mapping_info_map

    def infos(self, topics: list[str] | None = None) -> dict[str, TopicQueueMappingInfo]:
        """Return the mappings of all topics, or of some topics, for the registration with name servers."""
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
        """Return the reason to refuse a mapping, or an empty text."""
        known = self.details.get(detail.topic)
        # If two operators change a mapping concurrently, the change of the older mapping has the smaller epoch.
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
        """Create or change a static topic. The topic is on the disk when this returns."""
        self._save(self.details | {detail.topic: detail})

    def remove(self, *topics: str) -> None:
        """Remove topics, if they exist."""
        if not self.details.keys().isdisjoint(topics):
            self._save({name: detail for name, detail in self.details.items() if name not in topics})

    def replace_with(self, copied: TopicConfigTable) -> bool:
        """Replace the table by the master's table and write it, unless the master has no table or the versions are
        equal. Return True if the table was replaced. Raises StoreMismatch: a mapping is not supported. Nothing has
        changed."""
        version, details = copied.mapping_data_version, copied.topic_queue_mapping_detail_map
        if not isinstance(version, DataVersion) or not isinstance(details, dict) or version == self.data_version:
            return False
        # Check all mappings first: a partial table with the master's version would stay partial.
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
        """Return the local number for a global number; None if the queue is on another broker. For a negative number
        return any local number."""
        local = self.local[topic]
        return local.get(number) if number >= 0 else next(iter(local.values()), None)

    def everywhere(self, topic: str, queue_id: int) -> int:
        """Return the global number for a local number. For a topic that is not static, both numbers are equal."""
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
_MEMBER = "topicConfigTable"


class TopicTable:
    """The topics by name. ``on_change``: called with topics that were created or changed, after they are on the disk.
    ``has_light``: True if every name of a light queue is a topic with one queue, without a row in the table.
    ``saved``: the rows with their files."""

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
        self._store_root = folder.parent
        self._settings = settings
        self._on_change = on_change
        self.saved = JournaledTable(folder / "topics.json", {_MEMBER: TopicConfig}, clock, self._changed)
        self._table: dict[str, TopicConfig] = self.saved.members[_MEMBER]
        self._own: frozenset[str] = frozenset()
        self.static = StaticTopics(folder, settings, clock)

    @property
    def data_version(self) -> DataVersion:
        return self.saved.version

    def _changed(self, configs: list[TopicConfig]) -> None:
        # Register after the write: otherwise name servers could know a topic that a crash has lost.
        self._on_change(configs)

    def load(self) -> None:
        """Read the file and its journal, and add missing system topics. If the file is lost, also add topics for the
        store's queues: otherwise their messages could not be read. Do this even if there is a backup, because it may be
        older."""
        self.static.load()
        stored = self._read() or TopicConfigTable()
        _name_all(stored.topic_config_table)
        self.saved.load(stored.data_version, {_MEMBER: stored.topic_config_table})
        missing = self._missing_system_topics()
        if missing:
            self.saved.change_soon(_rows(missing))
        # Only if the file is missing: after all topics were deleted, old queues remain until retention deletes them.
        if not disk.exists(self.saved.file.path):
            self._add_those_of_queues()

    def _read(self) -> TopicConfigTable | None:
        try:
            return self.saved.file.load(TopicConfigTable, restores=False)
        except StoreMismatch as error:
            _log.warning(
                "%s; both are kept as *.damaged, and the topics are created from the queues of the store", error
            )
            self.saved.file.set_aside()
            return None

    def _add_those_of_queues(self) -> None:
        added: dict[str, TopicConfig] = {}
        for topic, (count, is_batch) in queue_counts(self._store_root).items():
            if topic not in self._table and not names.is_light(topic):
                attributes = {"queue.type": "BatchCQ"} if is_batch else {}
                added[topic] = TopicConfig(topic, count, count, _ALL, attributes=attributes)
        if added:
            self.saved.change_soon(_rows(added.values()))
            shown = ", ".join(f"{name} ({one.read_queue_nums})" for name, one in list(added.items())[:_LOGGED_MAX])
            _log.warning(
                "%s is lost: %d topics are taken from the store's queues, readable and writable, with as many queues "
                "as had messages: %s%s: check them with `rmq topic list`",
                *(self.saved.file.path, len(added), shown, ", …" if len(added) > _LOGGED_MAX else ""),
            )

    def add_system_topics(self) -> None:
        """Create the system topics that the changed settings require."""
        if missing := self._missing_system_topics():
            self.put(*missing)

    def register_all(self) -> None:
        """Register all topics with the name servers again, as if they had changed."""
        self.saved.change({})  # this sets a new version: name servers ignore a version that they have
        self._on_change(list(self._table.values()))

    def _missing_system_topics(self) -> list[TopicConfig]:
        system = _system_topics(self._settings)
        self._own = frozenset(config.topic_name for config in system)
        return [config for config in system if config.topic_name not in self._table]

    def __len__(self) -> int:
        return len(self._table)

    def get(self, topic: str) -> TopicConfig | None:
        config = self._table.get(topic)
        if config is None and names.is_light(topic):
            lite = names.split_lite_queue(topic)
            parent = None if lite is None else self._table.get(lite[0])
            if parent is not None and parent.is_lite:
                return TopicConfig(topic, 1, 1, parent.perm)
            return TopicConfig(topic, 1, 1, _ALL) if self._has_light else None
        return config

    def is_batch_topic(self, topic: str) -> bool:
        config = self._table.get(topic)
        return config is not None and config.is_batch_queue

    def snapshot(self, topics: list[TopicConfig] | None = None) -> TopicConfigTable:
        """Return all topics, or the current rows of some topics, with the version of the table. This is the content of
        a registration."""
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
        """Return True if a topic is a system topic. Clients can neither create nor delete system topics."""
        return topic in self._own or names.is_system_topic(topic)

    @property
    def system_topics(self) -> list[str]:
        """The known names of topics for which `is_system` is True."""
        return sorted(self._own | names.SYSTEM_TOPICS | {topic for topic in self._table if self.is_system(topic)})

    def put(self, *configs: TopicConfig) -> None:
        """Create or change topics. When this returns, they are on the disk. When this raises, they are unchanged."""
        assert all(config.topic_name for config in configs), "a topic has a name"
        self.saved.change(_rows(configs))
        self._changed(list(configs))

    async def put_shared(self, *configs: TopicConfig) -> None:
        """Create or change topics like `put`, but share one write with all changes that arrive before it begins. The
        changes succeed or fail together."""
        await self.saved.change_shared(_rows(configs))

    async def ensure_shared(self, topic: str, queue_count: int) -> None:
        """Create a topic that the broker itself needs, if it is missing, with `put_shared`. The topic is readable and
        writable. Raises StoreUnavailable: the disk refused, and the topic does not exist."""
        if topic not in self._table:
            sys_flag = _sys_flag(topic, unit=False)
            await self.put_shared(TopicConfig(topic, queue_count, queue_count, _ALL, topic_sys_flag=sys_flag))

    def remove(self, *topics: str) -> None:
        """Remove topics, if they exist, with one write. Name servers return a topic until they receive its deletion."""
        self.static.remove(*topics)
        known = [topic for topic in dict.fromkeys(topics) if topic in self._table]
        if known:
            self.saved.change({(_MEMBER, topic): None for topic in known})

    def replace_with(self, copied: TopicConfigTable) -> bool:
        """Replace the table by the master's table, unless the versions are equal. Topics that the master does not have
        are removed. Only the differences are written. Return True if the table was replaced.
        Source: behaviour.md §10.1.
        Raises StoreMismatch: a static topic is not supported, so static topics were not copied."""
        is_other = copied.data_version != self.data_version
        if is_other:
            _name_all(copied.topic_config_table)
            self.saved.replace({_MEMBER: copied.topic_config_table}, copied.data_version)
        return self.static.replace_with(copied) or is_other

    def mark_ordered(self, topics: Iterable[str]) -> None:
        """Mark topics as ordered, if the broker has them.
        A mark stays when the name servers no longer list the topic, as with 5.x brokers (checked with 5.4.0)."""
        known = filter(None, map(self._table.get, topics))
        changed = [msgspec.structs.replace(config, order=True) for config in known if not config.order]
        if changed:
            self.put(*changed)

    def persist(self) -> None:
        self.saved.persist()

    async def write_new(self) -> None:
        """Write the changes of `ensure` and `remove_unused`, and the file if it is time. The broker calls this every
        second."""
        await self.saved.write_new()

    def create_for_send(self, topic: str, *, template: str, queue_count: int, unit: bool = False) -> TopicConfig | None:
        """Return the topic of a send. Create a missing topic from the producer's template topic if this is allowed.
        Return None if the topic does not exist and must not be created."""
        known = self._table.get(topic)
        if known is not None:
            return known
        # Like in the reference, any topic with the INHERIT bit may be a template, and retry topics need no template.
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
        """Return a topic that the broker itself needs. Create a missing topic, readable and writable. ``soon``: let
        `write_new` write the topic."""
        known = self._table.get(topic)
        if known is not None:
            return known
        sys_flag = _sys_flag(topic, unit=unit)
        created = TopicConfig(topic, queue_count, queue_count, _ALL, topic_sys_flag=sys_flag, order=order)
        if soon:
            # The topic is registered before it is on the disk. If a crash loses the topic, it is created again.
            self.saved.change_soon({(_MEMBER, topic): created})
        else:
            self.saved.change({(_MEMBER, topic): created})
        assert self._table[topic] is created, "the registered topic is in the table"
        self._on_change([created])
        return created

    def remove_unused(self, topic: str, made: TopicConfig) -> None:
        """Remove a topic that `ensure` created, unless it was changed since. `write_new` writes the removal."""
        if self._table.get(topic) is made:  # compare the objects: an operator may have put an equal topic
            self.saved.change_soon({(_MEMBER, topic): None})


def _rows(configs: Iterable[TopicConfig]) -> dict[tuple[str, str], TopicConfig]:
    return {(_MEMBER, config.topic_name): config for config in configs}


def _name_all(table: dict[str, TopicConfig]) -> None:
    for name, config in table.items():
        config.topic_name = config.topic_name or name


def _system_topics(settings: BrokerSettings) -> list[TopicConfig]:
    """Return the system topics that a broker creates at its start."""
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
    """Return the system flag of a topic. With ``unit`` it is UNIT, or UNIT_SUB for a retry topic; otherwise 0."""
    # These are bits of Apache's TopicSysFlag. Name servers use them to list topics (codes 311 to 313).
    return (2 if topic.startswith(names.RETRY_PREFIX) else 1) if unit else 0


def _system(name: str, queues: int, perm: int = _ALL) -> TopicConfig:
    return TopicConfig(name, queues, queues, int(perm))

"""Static topics: queues numbered over the whole topic, of which each broker has some (``TopicQueueMappingManager``).

===================  ===============================================================================================
number of a queue    is
===================  ===============================================================================================
global               its number in the topic, which clients know and requests carry
local                its number among the queues on this broker, by which the store and offsets know it
===================  ===============================================================================================

Requests with a global number are answered for the local queue, one for a queue that is elsewhere with
NOT_LEADER_FOR_QUEUE. Kept in ``config/topicQueueMapping.json``, registered with the topics, copied by slaves. Not here:
queues that moved from one broker to another, whose offsets continue over both; such mappings are refused, and a file
that holds one is not opened. Loop only. Source: behaviour.md §2.8; remoting.md §4.6.2, §6.4.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
from msgspec import Struct, field

from rmqkit.broker.settings import BrokerSettings
from rmqkit.clock import Clock
from rmqkit.errors import StoreMismatch
from rmqkit.protocol.schemas.topics import DataVersion, TopicConfigTable, TopicQueueMappingDetail, TopicQueueMappingInfo
from rmqkit.store.json_files import JsonFile

__all__ = ["StaticTopics"]


class _Stored(Struct, rename="camel"):
    data_version: DataVersion = field(default_factory=DataVersion)
    topic_queue_mapping_info_map: dict[str, TopicQueueMappingDetail] = field(default_factory=dict)


class StaticTopics:
    """The static topics of one broker.

    Attributes:
        local: topic → global number → local number, of the queues that are here.
    """

    def __init__(self, folder: Path, settings: BrokerSettings, clock: Clock) -> None:
        self._file = JsonFile(folder / "topicQueueMapping.json")
        self._settings = settings
        self._clock = clock
        self._stored = _Stored()
        self.local: dict[str, dict[int, int]] = {}

    def load(self) -> None:
        """Read the file. Raises StoreMismatch: it holds what is not supported, and nothing was changed."""
        self._stored = self._file.load(_Stored) or _Stored()
        for topic, detail in self._stored.topic_queue_mapping_info_map.items():
            if reason := self._unsupported(detail):
                raise StoreMismatch(f"{self._file.path}: topic {topic}: {reason}")
            self.local[topic] = _local(detail)

    @property
    def data_version(self) -> DataVersion:
        return self._stored.data_version

    @property
    def details(self) -> dict[str, TopicQueueMappingDetail]:
        """What is known of every static topic, to be read only."""
        return self._stored.topic_queue_mapping_info_map

    def infos(self, topics: list[str] | None = None) -> dict[str, TopicQueueMappingInfo]:
        """What name servers are told, of all or some topics."""
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

    def take_over(self, copied: TopicConfigTable) -> bool:
        """Become the static topics of the master, unless it has none to tell or their version is the own one.
        Returns whether they were others; on the disk then.
        Raises StoreMismatch: one of them is not supported; nothing was changed."""
        version, details = copied.mapping_data_version, copied.topic_queue_mapping_detail_map
        if not isinstance(version, DataVersion) or not isinstance(details, dict) or version == self.data_version:
            return False
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
        self._file.save(stored)
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

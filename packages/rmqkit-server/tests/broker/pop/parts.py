"""The handlers of POP over a small store, without a server and connections."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

from rmqkit.broker.handlers import OwnAddress
from rmqkit.broker.pop.handlers import PopAckHandlers, PopHandlers
from rmqkit.broker.pop.service import PopService
from rmqkit.broker.settings import BrokerSettings
from rmqkit.broker.statistics import Statistics
from rmqkit.broker.tables.groups import GroupTable
from rmqkit.broker.tables.offsets import OffsetTable
from rmqkit.broker.tables.topics import TopicTable
from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.command import FrameSplitter, decode_command, encode_command, request
from rmqkit.protocol.schemas.pop import (
    AckMessageRequest,
    ChangeInvisibleTimeRequest,
    NotificationRequest,
    PeekMessageRequest,
    PollingInfoRequest,
    PopMessageRequest,
)
from rmqkit.protocol.schemas.topics import TopicConfig
from rmqkit.protocol.templates import success_frames
from rmqkit.remoting.router import Router
from rmqkit.store.message_store import MessageStore, PutStatus
from rmqkit.testing.clock import StandingClock
from tests.broker.pops import Popped, named
from tests.store.stores import HOST, message, small_settings

NOW_MS = 1_800_000_000_000
BROKER = "broker-a"


def from_wire(data):
    (frame,) = FrameSplitter().feed(data)
    return decode_command(frame)


def decoded(command):
    """Return a command as the other side decodes it."""
    return from_wire(b"".join(encode_command(command)))


class Peer:
    """A connection that records the answers."""

    peer = "127.0.0.1:1"
    is_open = True

    def __init__(self):
        self.answers = []

    def send(self, command):
        self.answers.append(decoded(command))

    def send_frame(self, *pieces):
        self.answers.append(from_wire(b"".join(pieces)))

    def send_successes(self, opaques):
        self.answers += [from_wire(success_frames([opaque])) for opaque in opaques]

    def warn(self, line): ...

    def cork(self): ...

    def flush(self): ...


class PopBroker:
    """A broker that only pops, on a clock that stands still: topic T with two queues, and two revive queues."""

    def __init__(self, root, *, durability=None, log_file_bytes=4096, **settings):
        folder = root / "config"
        self.clock = clock = StandingClock(NOW_MS)
        self.settings = BrokerSettings(
            broker_name=BROKER, **{"revive_queue_count": 2, "higher_queues_first": False} | settings
        )
        sizes = {"consume_queue_file_bytes": 20_000, "commit_log_file_bytes": log_file_bytes}
        self.store = MessageStore(root, small_settings(**sizes), clock=clock)
        self.topics = TopicTable(folder, self.settings, clock, lambda topics: None)
        self.groups = GroupTable(folder, self.settings, clock)
        self.offsets = OffsetTable(folder, clock)
        tables = self.topics, self.groups, self.offsets
        self.pop_service = PopService(folder, self.store, *tables, self.settings, clock, HOST)
        for table in tables:
            table.load()
        self.store.open()
        self.topics.put(TopicConfig("T", 2, 2))
        self.pop_service.load()
        self.context = SimpleNamespace(
            older=None,
            first_offset=self.store.min_offset,
            clients=SimpleNamespace(compensate=lambda *fields: None),
            clock=clock,
            counts=None,
            durability=durability,
            groups=self.groups,
            identity=OwnAddress("10.0.0.1", HOST),
            offsets=self.offsets,
            pop=self.pop_service,
            settings=self.settings,
            statistics=Statistics(self.store, "DefaultCluster", clock, lambda topic: False),
            store=self.store,
            topics=self.topics,
        )
        self.router = Router()
        for handlers in (PopHandlers(self.context), PopAckHandlers(self.context)):
            handlers.register(self.router)

    def close(self):
        self.store.close()

    def put(self, *bodies, topic="T", queue=0, **fields):
        for body in bodies:
            assert self.store.put(message(topic, queue, body.encode(), **fields)).status is PutStatus.OK

    def begin(self, code, header, *, one_way=False, body=b""):
        """Handle a request and return its connection, whose answer may come later."""
        peer = Peer()
        self.router.handle(peer, decoded(request(code, header, body, one_way=one_way)))
        return peer

    async def ask(self, code, header, **fields):
        """Return the answer of this tick to a request, or None while the request waits."""
        peer = self.begin(code, header, **fields)
        await asyncio.sleep(0)
        assert len(peer.answers) <= 1
        return peer.answers[0] if peer.answers else None

    def pop_header(self, kind=PopMessageRequest, **fields):
        wanted = {"consumer_group": "g", "topic": "T", "queue_id": -1, "poll_time": 0, "born_time": NOW_MS}
        if kind is PopMessageRequest:
            wanted |= {"max_msg_nums": 32, "invisible_time": 60_000, "init_mode": 0, "exp_type": "TAG", "exp": "*"}
        if kind is PeekMessageRequest:
            wanted |= {"max_msg_nums": 32}
        if kind in (PeekMessageRequest, PollingInfoRequest):
            del wanted["poll_time"], wanted["born_time"]
        return kind(**wanted | fields)

    async def pop(self, **fields):
        """Return the messages of a pop, or None if it waits."""
        answer = await self.ask(RequestCode.POP_MESSAGE, self.pop_header(**fields))
        return None if answer is None else Popped(answer, BROKER)

    def wait_for_pop(self, **fields):
        """Begin a pop that waits, and return its connection."""
        return self.begin(RequestCode.POP_MESSAGE, self.pop_header(**{"poll_time": 10_000} | fields))

    def wait_for_notification(self, **fields):
        header = self.pop_header(NotificationRequest, **{"poll_time": 10_000} | fields)
        return self.begin(RequestCode.NOTIFICATION, header)

    async def ack(self, handle, *, one_way=False, **fields):
        header = AckMessageRequest(**named(handle) | fields)
        return await self.ask(RequestCode.ACK_MESSAGE, header, one_way=one_way)

    async def change(self, handle, invisible_ms, **fields):
        header = ChangeInvisibleTimeRequest(**named(handle) | {"invisible_time": invisible_ms} | fields)
        return await self.ask(RequestCode.CHANGE_MESSAGE_INVISIBLETIME, header)

    @property
    def pending(self):
        """The offsets in flight, by topic, group, queue id, start offset and pop time."""
        return self.pop_service.check_points.pending

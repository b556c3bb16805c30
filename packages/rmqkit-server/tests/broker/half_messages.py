"""A store with half messages, the parts that check them, and producers that record the questions."""

from __future__ import annotations

from types import SimpleNamespace

from rmqkit.broker.messages import to_half
from rmqkit.broker.settings import BrokerSettings
from rmqkit.broker.tables.clients import ClientTable, Member
from rmqkit.broker.tables.filters import FilterTable
from rmqkit.broker.tables.offsets import OffsetTable
from rmqkit.broker.tables.topics import TopicTable
from rmqkit.broker.transaction.check_back import CheckBack
from rmqkit.broker.transaction.half import OpMessages
from rmqkit.broker.transaction.open import OpenTransactions
from rmqkit.protocol.command import decode_header
from rmqkit.protocol.names import HALF_TOPIC, OP_HALF_TOPIC, TRANS_CHECK_MAX_TIME_TOPIC, TRANSACTION_GROUP
from rmqkit.protocol.properties import decode_properties
from rmqkit.protocol.record import decode_record
from rmqkit.protocol.schemas.send import CheckTransactionRequest
from rmqkit.store.message_store import MessageStore
from rmqkit.testing.clock import StandingClock
from tests.store.stores import HOST, message, read_all, small_settings
from tests.virtual_time import run as run_virtual


class AskedProducer:
    """A producer's connection that records the received commands."""

    def __init__(self) -> None:
        self.is_writable = True
        self.commands = []

    def send(self, command):
        self.commands.append(command)

    @property
    def asked(self):
        """Return the header and the record of every question."""
        return [(decode_header(c, CheckTransactionRequest), decode_record(c.payload)) for c in self.commands]


class HalfMessages:
    """Everything about half messages on a clock that stands still; ``round`` is a check-back round."""

    def __init__(self, root, *, now_ms=1_800_000_000_000, store=None, **settings):
        self.clock = StandingClock(now_ms)
        self.settings = BrokerSettings(broker_name="broker-a", **settings)
        self.store_settings = store or small_settings(commit_log_file_bytes=1 << 20)
        self.store = MessageStore(root, self.store_settings, clock=self.clock)
        self.store.open()
        self.topics = TopicTable(root / "config", self.settings, self.clock, lambda changed: None)
        self.topics.load()
        self.offsets = OffsetTable(root / "config", self.clock)
        self.offsets.load()
        self.clients = ClientTable(self.settings, self.clock, FilterTable(root / "config", self.settings, self.clock))
        self.ops = OpMessages(self.store, HOST, self.clock, body_bytes_max=self.settings.transaction_op_bytes_max)
        self.durability = None
        self.transactions = OpenTransactions(self.store, self.topics, self.offsets, self.ops)
        self.check_back = CheckBack(self)  # this object has the parts that check-back needs

    def producer(self, group="p"):
        connection = AskedProducer()
        self.clients.register_producer(connection, Member("c", "JAVA", 0, 0.0), group)
        return connection

    def half(self, body=b"hello", topic="T", queue_id=3, group="p", **properties):
        """Put a half message that is born now, and return the store's result."""
        born = {"born_timestamp": self.clock.ms, **properties}
        prepared = message(topic, queue_id, body, TRAN_MSG="true", PGROUP=group, UNIQ_KEY=f"K-{body.decode()}", **born)
        return self.store.put(to_half(prepared))

    def round(self, after_ms=0):
        self.clock.ms += after_ms
        run_virtual(self.check_back.round())

    def records(self, topic=HALF_TOPIC):
        return [
            SimpleNamespace(**{n: getattr(r, n) for n in r.__struct_fields__}, named=decode_properties(r.properties))
            for r in read_all(self.store, topic, 0)
        ]

    @property
    def given_up(self):
        return self.records(TRANS_CHECK_MAX_TIME_TOPIC)

    @property
    def positions(self):
        """Return the offsets that the check cycles have reached in the half queue and in the op queue."""
        return tuple(self.offsets.get(TRANSACTION_GROUP, topic, 0) for topic in (HALF_TOPIC, OP_HALF_TOPIC))

    def close(self):
        self.ops.write()
        self.offsets.persist()
        self.store.close()

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.close()

"""Headers of broker administration and replication: 26, 370, 906, 908. Source: remoting.md §4.4."""

from __future__ import annotations

from msgspec import Struct

from rmqkit.protocol.numbers import Int64


class BrokerConfigResponse(Struct, gc=False):
    """GET_BROKER_CONFIG; ``version`` is a DataVersion as JSON."""

    version: str | None = None


class RecallMessageRequest(Struct, rename="camel", kw_only=True, gc=False):
    """RECALL_MESSAGE; the handle is what `rmqkit.protocol.recall` reads."""

    producer_group: str | None = None
    topic: str
    recall_handle: str


class RecallMessageResponse(Struct, rename="camel", gc=False):
    """The unique key of the message that will not be delivered."""

    msg_id: str


class HaInfo(Struct, rename="camel", gc=False):
    """EXCHANGE_BROKER_HA_INFO both ways; an empty request asks, a filled one tells a slave its master."""

    master_ha_address: str | None = None
    master_flush_offset: Int64 | None = None
    master_address: str | None = None


class MasterFlushOffsetRequest(Struct, rename="camel", gc=False):
    """RESET_MASTER_FLUSH_OFFSET."""

    master_flush_offset: Int64

"""Headers between brokers and name servers: 103, 104, 322, 901, 904, 905. Source: remoting.md §4.2, §4.4."""

from __future__ import annotations

from msgspec import Struct, field

from rmqkit.protocol.numbers import Int32, Int64


class BrokerIdentity(Struct, rename="camel", gc=False):
    """UNREGISTER_BROKER and QUERY_DATA_VERSION: which broker; id 0 is the master."""

    broker_name: str
    broker_addr: str
    cluster_name: str
    broker_id: Int64


class RegisterBrokerRequest(BrokerIdentity, gc=False):
    """REGISTER_BROKER.

    Attributes:
        heartbeat_timeout_millis: how long the broker may be silent; missing means 120 s.
        enable_acting_master: missing from brokers before 5.0, which differs from false.
        compressed: whether the body is in the compressed form.
        body_crc32: CRC-32 of the body as sent, without its top bit; 0 or missing means unchecked.
        zone_name: where the broker stands, for clients that ask for one zone only.
    """

    ha_server_addr: str | None = None
    heartbeat_timeout_millis: Int64 | None = None
    enable_acting_master: bool | None = None
    compressed: bool = False
    body_crc32: Int32 = 0
    zone_name: str | None = field(default=None, name="__ZONE_NAME")


class RegisterBrokerResponse(Struct, rename="camel", gc=False):
    """Filled for a slave whose master is known."""

    ha_server_addr: str | None = None
    master_addr: str | None = None


class DataVersionResponse(Struct, gc=False):
    """Answer to QUERY_DATA_VERSION."""

    changed: bool


class BrokerHeartbeat(Struct, rename="camel", gc=False):
    """BROKER_HEARTBEAT to a name server."""

    cluster_name: str
    broker_addr: str
    broker_name: str


class BrokerMemberGroupRequest(Struct, rename="camel", gc=False):
    """GET_BROKER_MEMBER_GROUP."""

    cluster_name: str
    broker_name: str


class MinBrokerIdChange(Struct, rename="camel", gc=False):
    """NOTIFY_MIN_BROKER_ID_CHANGE; ``offline_broker_addr`` is missing when somebody joined."""

    min_broker_id: Int64
    broker_name: str
    min_broker_addr: str
    offline_broker_addr: str | None = None
    ha_broker_addr: str | None = None

"""Headers between brokers and name servers: 103, 104, 322. Source: remoting.md §4.2."""

from __future__ import annotations

from msgspec import Struct

__all__ = [
    "BrokerIdentity",
    "DataVersionResponse",
    "RegisterBrokerRequest",
    "RegisterBrokerResponse",
]


class BrokerIdentity(Struct, rename="camel", gc=False):
    """UNREGISTER_BROKER and QUERY_DATA_VERSION: which broker; id 0 is the master."""

    broker_name: str
    broker_addr: str
    cluster_name: str
    broker_id: int


class RegisterBrokerRequest(Struct, rename="camel", gc=False):
    """REGISTER_BROKER; ``body_crc32`` 0 or missing means unchecked."""

    broker_name: str
    broker_addr: str
    cluster_name: str
    broker_id: int
    ha_server_addr: str | None = None
    heartbeat_timeout_millis: int | None = None
    enable_acting_master: bool | None = None
    compressed: bool = False
    body_crc32: int = 0


class RegisterBrokerResponse(Struct, rename="camel", gc=False):
    """Filled for a slave whose master is known."""

    ha_server_addr: str | None = None
    master_addr: str | None = None


class DataVersionResponse(Struct, gc=False):
    """Answer to QUERY_DATA_VERSION."""

    changed: bool

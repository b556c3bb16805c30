"""Access of tests to private names of the replication modules and of the broker's stop. No other test file uses these
names."""

from __future__ import annotations

from typing import Any

from rmqkit.broker.context import Stage
from rmqkit.broker.replication.slave import HaSlave, _Link
from rmqkit.broker.server import Broker
from rmqkit.clock import SYSTEM_CLOCK


def accepted_by(ha: Any) -> Any:
    """Return the protocol that a master gives to a new connection at its HA port."""
    return ha._link()


async def close_ports(broker: Broker) -> None:
    """Close all ports of a broker and their connections. The broker works on without them; `Broker.stop` stops it."""
    for stage in (Stage.PORTS, Stage.REPLICATION):
        await broker._lifecycle._stacks[stage].aclose()


def follow_by_hand(part: Any, master: Any) -> None:
    """Have a slave's part follow a master without starting its rounds: the test calls `one_round`."""
    part._master = master


def is_round_due(ha: Any) -> bool:
    """Return True if a master will send the log in the next loop iteration."""
    return ha._is_round_due


def link_of(slave: HaSlave, buffer_bytes: int) -> _Link:
    """Return a link whose frames a slave appends, with a read buffer of some size."""
    return _Link(slave._append_frames, SYSTEM_CLOCK, memoryview(bytearray(buffer_bytes)))


def master_of(acting: Any) -> Any:
    """Return the address of the master that an acting master knows; None without one."""
    return acting._master


async def one_round(part: Any) -> float:
    """Run one round of a slave's part; return the pause after it in milliseconds."""
    return await part._round()


def port_of(ha: Any) -> Any:
    """Return the HA port on the whole bind address of a master."""
    return ha._port


def tasks_of(part: Any) -> Any:
    """Return the running tasks of a slave's part."""
    return part._tasks


def transport_of(link: Any) -> Any:
    """Return the transport of a master's link."""
    return link._transport


def wake_of(part: Any) -> Any:
    """Return the event that starts the next round of a part."""
    return part._wake

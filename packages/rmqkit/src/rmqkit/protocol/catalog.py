"""The catalog of requests: the `Operation` of every code.

Most rows are next to their schemas. This module declares only the rows of requests that rmqkit does not use, and joins
them with the rows of each schema module. A new request in a schema module needs no change here. Source: remoting.md §4.
"""

from __future__ import annotations

from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.operation import BROKER, Operation, Server
from rmqkit.protocol.schemas import access, brokers, clients, groups, lite, offsets, pop, pull, send, topics

__all__ = ["CATALOG"]

_CONTROLLER = (Server.CONTROLLER,)
_CONTAINER = (Server.CONTAINER,)

# Columns: tier, servers, codes.
_UNTYPED: tuple[tuple[int, tuple[Server, ...], tuple[int, ...]], ...] = (
    (2, BROKER, (50, 51, 52, 53, 54)),  # the plain ACL of 4.4 to 5.2
    (3, BROKER, (354, 355, 513, 1007, 1008, *range(2001, 2005), 5001, 200056)),
    (3, _CONTROLLER, (*range(1001, 1007), *range(1009, 1014))),
    (3, _CONTAINER, (902, 903)),
)


def _catalog() -> dict[int, Operation]:
    found = [
        row
        for module in (access, brokers, clients, groups, lite, offsets, pop, pull, send, topics)
        for row in module.OPERATIONS
    ]
    found += [
        Operation(RequestCode(code), tier, servers, is_typed=False)
        for tier, servers, codes in _UNTYPED
        for code in codes
    ]
    assert len({row.code for row in found}) == len(found), "each code has one row"
    return {int(row.code): row for row in sorted(found, key=lambda row: row.code)}


CATALOG = _catalog()
"""Request code → its operation, in the order of codes."""

assert list(CATALOG) == sorted(RequestCode), "each code has a row"

"""The protobuf messages of ``apache.rocketmq.v2`` and the methods of its service.

The classes are made from `messages.binpb`, the compiled form of the .proto files in this folder (`rocketmq-apis`,
commit 3e60073, Apache License 2.0). They are in a separate descriptor pool: the official Python SDK registers the same
names in protobuf's default pool, and a process with both registrations would not start. No code is generated, so
protobuf's version rules for generated code do not apply.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from google.protobuf import descriptor_pool, message_factory
from google.protobuf.message import DecodeError, Message

__all__ = ["SERVICE", "DecodeError", "Message", "Method", "message_class", "methods"]

SERVICE = "apache.rocketmq.v2.MessagingService"
"""Full name of the service, as in the path of a call."""


def _load() -> descriptor_pool.DescriptorPool:
    # importlib.resources is not used, because its import would take a fifth of the broker's startup time for gRPC.
    compiled, pool = pkgutil.get_data(__name__, "messages.binpb"), descriptor_pool.DescriptorPool()
    assert compiled is not None, "the loader of the package returns data"
    for file in _files(compiled):  # each file follows its imports
        pool.AddSerializedFile(file)
    return pool


def _files(compiled: bytes) -> Iterator[bytes]:
    """Yield the encoded files of a ``FileDescriptorSet``. The class of this message is not used, because its module
    `descriptor_pb2` takes as long to load as the whole schema."""
    at = 0
    while at < len(compiled):
        assert compiled[at] == 0x0A, "the only field of a set is its files"
        size = shift = 0
        while True:
            at += 1
            size |= (compiled[at] & 0x7F) << shift
            if compiled[at] < 0x80:
                break
            shift += 7
        yield compiled[at + 1 : at + 1 + size]
        at += 1 + size


_POOL = _load()


@dataclass(frozen=True, slots=True)
class Method:
    """One method of the service; ``path``: the ``:path`` of its calls."""

    name: str
    path: str
    request: type[Message]
    response: type[Message]
    streams_requests: bool
    streams_responses: bool


def message_class(name: str) -> Any:
    """Return the class of a message by its name in ``apache.rocketmq.v2``, or by its full name (with a dot)."""
    full = name if "." in name else f"apache.rocketmq.v2.{name}"
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(full))


def methods() -> list[Method]:
    """Return all methods of the service in the order of its .proto file."""
    return [
        Method(
            method.name,
            f"/{SERVICE}/{method.name}",
            message_factory.GetMessageClass(method.input_type),
            message_factory.GetMessageClass(method.output_type),
            method.client_streaming,
            method.server_streaming,
        )
        for method in _POOL.FindServiceByName(SERVICE).methods
    ]

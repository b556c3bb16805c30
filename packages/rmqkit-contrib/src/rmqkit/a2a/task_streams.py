"""The events of A2A tasks, A2A's `TaskEventStream`: a stream for each task.

The SDK's request handler publishes each event of a task after it has stored the task. A process that does not run the
agent of a task answers a subscription with the stored task, then with the events of the stream that are newer. Each
event has the version of the task that it produced. Task stores count versions, or have none:

===================================  ==============================  ==============================================
task store                           version                         a subscription gets the task, and
===================================  ==============================  ==============================================
`VersionedDatabaseTaskStore`         1, 2, ...                       the events after this version of the task
`DatabaseTaskStore` and others       none                            all stored events of the task, from the first
===================================  ==============================  ==============================================

An event is a `StreamResponse` in protobuf, as A2A sends it over gRPC. Its version is in the header ``a2a-version``, as
JSON. A message, and an event after which the task has ended, is the last event of its stream. Streams expire: `destroy`
has nothing to do. The name of a stream is the id of its task (see `stream_name`).

An event that no broker stores fails the task, like a task that cannot be stored.

The SDK has an older interface, `QueueManager`. Its handler applies every event that a subscriber reads to the stored
task, so old events of a queue that outlives the process would change the task a second time. It has no implementation
here.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from types import TracebackType
from typing import Self

import msgspec
from a2a.server.cluster import TaskEventStream, TaskVersion, VersionedEvent
from a2a.server.events import Event
from a2a.types.a2a_pb2 import Message, StreamResponse, Task, TaskState, TaskStatusUpdateEvent
from a2a.utils.errors import InternalError
from a2a.utils.proto_utils import to_stream_response

from rmqkit.errors import ClientError, StreamExpired
from rmqkit.streams import Streams, stream_name
from rmqkit.streams.embedded import EmbeddedStreams

__all__ = ["TaskStreams"]

_VERSION = "a2a-version"
_ENDS = frozenset(
    (
        TaskState.TASK_STATE_COMPLETED,
        TaskState.TASK_STATE_CANCELED,
        TaskState.TASK_STATE_FAILED,
        TaskState.TASK_STATE_REJECTED,
    )
)


class TaskStreams(TaskEventStream):
    """The ``event_stream`` of the SDK's `DefaultRequestHandler`. Use it with ``async with`` while the server runs.

    Args:
        streams: the result of `rmqkit.streams.open` or `embedded`. Entering opens the streams, leaving closes them.
    """

    def __init__(self, streams: Streams | EmbeddedStreams) -> None:
        self._source = streams
        self._streams: Streams | None = None

    async def __aenter__(self) -> Self:
        self._streams = await self._source.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._streams = None
        await self._source.__aexit__(kind, error, trace)

    async def publish(self, task_id: str, event: VersionedEvent) -> None:
        """Store an event of a task. Raises the errors of `Streams.append`."""
        await self._opened().append(
            stream_name(task_id),
            to_stream_response(event.event).SerializeToString(),
            headers={_VERSION: msgspec.json.encode(event.version._value).decode()},
            last=_is_last(event.event),
        )

    async def subscribe(self, task_id: str, *, after: TaskVersion) -> AsyncGenerator[VersionedEvent, None]:
        """Iterate over the events of a task that are newer than a version, up to the last one.
        Raises InternalError: the stream expired while it was read, because the task had no events for so long."""
        try:
            async for stored in self._opened().read(stream_name(task_id)):
                version = TaskVersion(msgspec.json.decode(stored.headers[_VERSION], type=int | str))
                if version.is_after(after):
                    yield VersionedEvent(_event(stored.data), version)
        except StreamExpired as error:
            raise InternalError(message=f"task {task_id}: {error}") from None

    async def destroy(self, task_id: str) -> None:
        """Do nothing: the stream of the task expires."""

    def _opened(self) -> Streams:
        if self._streams is None:
            raise ClientError("the task streams are not open: use `async with task_streams` while the server runs")
        return self._streams


def _is_last(event: Event) -> bool:
    """Return True for an event after which its task has no more events."""
    if isinstance(event, Message):
        return True
    return isinstance(event, Task | TaskStatusUpdateEvent) and event.status.state in _ENDS


def _event(data: bytes) -> Event:
    """Return the event in a stored response."""
    response = StreamResponse.FromString(data)
    kind = response.WhichOneof("payload")
    assert kind is not None, "a stored response has an event"
    event: Event = getattr(response, kind)
    return event

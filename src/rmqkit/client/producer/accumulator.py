"""Single sends that share requests (``ProduceAccumulator``), where ``auto_batch`` is on.

==========================================  ========================================================================
a send                                      goes
==========================================  ========================================================================
of a topic, queue, ``wait_store`` and tag   into the open batch of these
delayed, to a retry topic, large enough to  out alone and at once, like every send without ``auto_batch``
be compressed, or beyond
``batch_total_bytes`` that wait already
==========================================  ========================================================================

A batch goes out at ``batch_bytes`` or ``batch_delay_ms`` after its first message (`open_batches`); a program that
awaits one send after the other only gets slower. Every caller gets the result of its own message, or the error of the
batch. A caller that is cancelled takes nothing back: its message goes with the others. Closing sends what is open and
waits for it. Loop only. Source: behaviour.md §7.8, §7.12.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from rmqkit.client.observe.hooks import Hooks
from rmqkit.client.producer.encode import Outgoing
from rmqkit.client.producer.open_batches import Batch, OpenBatches, is_large, shares
from rmqkit.client.producer.sender import SendResult
from rmqkit.client.runtime.settings import ProducerSettings
from rmqkit.errors import RmqError
from rmqkit.protocol.bodies.clients import MessageQueue
from rmqkit.protocol.message import Message
from rmqkit.protocol.names import RETRY_PREFIX
from rmqkit.remoting.tasks import Tasks

__all__ = ["Accumulator"]

_Place = asyncio.Future[SendResult]


class Accumulator:
    """What the single sends of one producer wait in.

    Args:
        send: sends what is prepared, to a queue if one is chosen.
        next_key, hooks: as of `OpenBatches`.
    """

    def __init__(
        self,
        group: str,
        settings: ProducerSettings,
        *,
        send: Callable[[Outgoing, MessageQueue | None], Awaitable[SendResult]],
        next_key: Callable[[], str],
        hooks: Hooks,
    ) -> None:
        self._settings = settings
        self._send = send
        self._open: OpenBatches[tuple[str, MessageQueue | None, bool, str | None], _Place] = OpenBatches(
            group, settings, hooks=hooks, next_key=next_key, closed=self._closed, linger_ms=settings.batch_delay_ms
        )
        self._bytes = 0
        self._tasks = Tasks()

    def takes(self, message: Message) -> bool:
        """Whether a message may wait for others."""
        return not (
            self._bytes >= self._settings.batch_total_bytes
            or message.goes_alone
            or is_large(message.body, self._settings)
            or message.topic.startswith(RETRY_PREFIX)
        )

    async def send(self, message: Message, queue: MessageQueue | None) -> SendResult:
        """Send a message together with others. Raises as `Producer.send`."""
        place: _Place = asyncio.get_running_loop().create_future()
        key = (message.topic, queue, message.wait_store, message.tags)
        size = self._open.add(key, message, queue, place)  # which may close, and take off, another batch
        self._bytes += size
        return await place

    async def close(self) -> None:
        """Send what is open, and wait until everybody has a result or an error."""
        self._open.close_all()
        await self._tasks.finish()

    def _closed(self, batch: Batch[_Place], prepared: Outgoing | RmqError) -> None:
        if isinstance(prepared, RmqError):
            self._fail(batch, prepared)
        else:
            self._tasks.start(self._run(batch, prepared), "accumulated batch")

    async def _run(self, batch: Batch[_Place], prepared: Outgoing) -> None:
        try:
            result = await self._send(prepared, batch.queue)
        except asyncio.CancelledError:  # the loop ends
            for place in batch.places:
                place.cancel()
            raise
        except Exception as error:  # noqa: BLE001 - the task's outer edge: whoever waits is told what it was
            self._fail(batch, error)
        else:
            self._bytes -= batch.size
            for place, share in zip(batch.places, shares(result, batch.unique_keys), strict=True):
                if not place.done():
                    place.set_result(share)

    def _fail(self, batch: Batch[_Place], error: Exception) -> None:
        self._bytes -= batch.size
        for place in batch.places:
            if not place.done():
                place.set_exception(error)

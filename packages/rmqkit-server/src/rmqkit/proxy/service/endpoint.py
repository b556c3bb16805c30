"""The service: the path of a call from metadata to answer, and the work between calls (``GrpcMessagingApplication``).

A call is checked in the reference's order: the user who signed it, the permissions of the user, the client, the number
of the client's active calls. The checks of the method follow. A refusal is an answer with a status. An error of a
broker is answered with the status for its code.

Three calls also have a fast path, which serves the plain calls of a busy endpoint. The general path serves all other
calls, and reports errors. CPU in µs per call, if 1, 4 and 32 calls arrive in one read (``make bench T=grpc-cpu``):

==============  ========================================  =======================================  ===================
call            fast path                                 serves                                   fast, general
==============  ========================================  =======================================  ===================
SendMessage     `Sending.send_at_once`: no task, the      one plain message; broker in this        104, 66, 41;
                sends of a read are stored together       process, no policies, compiled core      220, 157, 115
AckMessage      `Receiving.ack_at_once`: no task, the     one entry whose handle was not renewed;  110, 53, 27;
                acks of a read are handled together       broker in this process, no policies      192, 117, 77
–, plain        the same, decoded by protobuf             the same without a compiled core         164, 96, 68;
Python                                                                                             255, 162, 104
ReceiveMessage  `Receiving._deliver_encoded`: the core    first deliveries, bodies not compressed; 24;
                encodes all messages of a pop             compiled core                            46 a message of 32
==============  ========================================  =======================================  ===================

Source: grpc.md §2, §3.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from rmqkit.clock import Clock
from rmqkit.errors import ConnectionLost, RmqError
from rmqkit.protocol.command import Command
from rmqkit.proxy.backend import Backend, Wanted
from rmqkit.proxy.local import Answered
from rmqkit.proxy.schema.messages import DecodeError, Method, message_class, methods
from rmqkit.proxy.schema.status import Code, Refused, name_of, refusal_of, status
from rmqkit.proxy.service.client_settings import LITE_CONSUMERS
from rmqkit.proxy.service.clients import CLIENT_SILENT_MS_MAX, AnswerWith, Call, CallEnded, Client, Clients, Stream
from rmqkit.proxy.service.lite_subscriptions import LiteLimits, LiteSubscriptions
from rmqkit.proxy.service.receipt_handles import ROUND_SECONDS
from rmqkit.proxy.service.receiving import Receiving, Write, WriteFramed
from rmqkit.proxy.service.rights import wanted_by, wanted_of, wanted_topic
from rmqkit.proxy.service.routes import Routes
from rmqkit.proxy.service.sending import Sending
from rmqkit.proxy.service.telemetry import Telemetry
from rmqkit.remoting.tasks import Tasks, repeat

__all__ = ["Endpoint", "StreamFailed"]

_ENDING = {
    Code.CLIENT_ID_REQUIRED,
    Code.INVALID_CLIENT_PROPERTIES,
    Code.TOO_MANY_REQUESTS,
    Code.UNAUTHORIZED,
}
"""The codes that are sent as the last status of a Telemetry stream. Other refusals are a gRPC status."""

_SWEEP_SECONDS = 10.0
_STOP_SECONDS = 10.0
_DRAIN_SECONDS = 1.0

_AtOnce = Callable[[Call, Client, bytes, AnswerWith], bool]
_Unary = Callable[[Call, Client, Any], Awaitable[Any]]

_log = logging.getLogger(__name__)
_ReceiveResponse = message_class("ReceiveMessageResponse")
_Command = message_class("TelemetryCommand")


class StreamFailed(Exception):
    """A Telemetry stream fails with a gRPC status: INVALID_ARGUMENT if ``is_argument``, else INTERNAL."""

    def __init__(self, text: str, *, is_argument: bool) -> None:
        super().__init__(text)
        self.is_argument = is_argument


class Endpoint:
    """The service for the calls of all clients. Use it only on the event loop.

    Args:
        backend: the brokers.
        port: the endpoint's port, for answers to clients that send the endpoint's address without a port.
        lite_limits: the limits of lite consumers.

    Attributes:
        sending, receiving: handle the calls of producers and of consumers.
        stopping: set when the endpoint stops.
        answered: number of answered calls, by method and code; None without metrics.
    """

    def __init__(self, backend: Backend, clock: Clock, *, port: int, lite_limits: LiteLimits | None = None) -> None:
        self._backend = backend
        self._clock = clock
        self._tasks = Tasks()
        self.stopping = asyncio.Event()
        self.answered: Counter[tuple[str, str]] | None = None
        self._rounds: list[asyncio.Task[None]] = []
        self._under_way = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._lite = lite = LiteSubscriptions(backend, clock, lite_limits or LiteLimits())
        self.receiving = receiving = Receiving(backend, lite, clock)
        self.sending = sending = Sending(backend, clock)
        self._telemetry = telemetry = Telemetry(backend, sending, lite, self._tasks)
        self.clients = Clients(backend, clock, telemetry.on_request, self._gone)
        routes = Routes(backend, port)
        self._at_once: dict[str, _AtOnce] = {}
        # `answer_at_once` only authenticates calls: with policies every call has to be authorized, too.
        if backend.at_once is not None and not backend.has_policies:
            self._at_once = {"SendMessage": sending.send_at_once, "AckMessage": receiving.ack_at_once}
        self._unary: dict[str, _Unary] = {
            "QueryRoute": lambda call, client, asked: routes.query(asked),
            "QueryAssignment": lambda call, client, asked: routes.assignment(asked),
            "SendMessage": sending.send,
            "RecallMessage": lambda call, client, asked: sending.recall(client, asked),
            "EndTransaction": lambda call, client, asked: sending.end_transaction(client, asked),
            "AckMessage": lambda call, client, asked: receiving.ack(client, asked),
            "ChangeInvisibleDuration": lambda call, client, asked: receiving.change_invisible(client, asked),
            "ForwardMessageToDeadLetterQueue": lambda call, client, asked: receiving.forward(client, asked),
            "Heartbeat": telemetry.heartbeat,
            "NotifyClientTermination": lambda call, client, asked: telemetry.terminate(client, asked),
            "SyncLiteSubscription": lambda call, client, asked: lite.sync(client, asked),
        }

    def start(self) -> None:
        """Start the periodic work: dropping silent clients and old half messages, renewing held messages."""
        for work, seconds in (
            (self.clients.drop_silent, _SWEEP_SECONDS),
            (self.sending.drop_old, _SWEEP_SECONDS),
            (self._renew, ROUND_SECONDS),
        ):
            name = f"gRPC: {getattr(work, '__name__', 'round')}"
            self._rounds.append(
                asyncio.create_task(repeat(work, name=name, seconds=seconds, end=self.stopping), name=name)
            )

    async def drain(self) -> None:
        """Wait a short time for the active unary calls. Held receives and streams are closed with the server."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_DRAIN_SECONDS):
                await self._idle.wait()

    async def stop(self) -> None:
        """Release the messages that clients hold, and forget the clients. The caller must have closed the ports."""
        self.stopping.set()
        # Wait for renewals first: an active renewal would hide a released message again.
        await asyncio.gather(*self._rounds)
        await self.receiving.close(_STOP_SECONDS)
        await self._tasks.close()
        self.clients.close()

    @property
    def methods(self) -> list[Method]:
        """The supported methods; others are UNIMPLEMENTED."""
        return [one for one in methods() if one.name in self._unary or one.name in ("ReceiveMessage", "Telemetry")]

    async def unary(self, method: Method, call: Call, asked: Any) -> Any:
        """Return the answer to a call with one request and one response."""
        self._under_way += 1
        self._idle.clear()
        try:
            with self._entered(call, await self._signer(method.name, call, asked)) as client:
                answer = await self._unary[method.name](call, client, asked)
        except RmqError as error:
            refused = refusal_of(error)
            answer = method.response(status=status(refused.code, refused.text))
        except Exception as error:  # noqa: BLE001 - the outer edge of a call: answered and logged once
            refused = _failed(method.name, call, error)
            answer = method.response(status=status(refused.code, refused.text))
        finally:
            self._under_way -= 1
            if not self._under_way:
                self._idle.set()
        if self.answered is not None:
            self.answered[method.name, name_of(answer.status.code)] += 1
        return answer

    def answer_at_once(self, method: Method, call: Call, content: bytes, write: Callable[[bytes], None]) -> bool:
        """Answer a frequent unary call without a task. Return False if `unary` must answer the call, and report its
        errors. ``write``: receives the encoded answer, now or later. The caller must call `handle_gathered` afterwards.
        """
        begin, backend = self._at_once.get(method.name), self._backend.at_once
        if begin is None or backend is None:
            return False
        try:
            client = self._client_of(call, backend.signer(call.metadata))
        except RmqError:
            return False
        self._enter(client)
        is_begun = False

        def answer(made_of: Callable[[Command], tuple[Code, bytes]]) -> Answered:
            def answered(outcome: Command | ConnectionLost) -> None:
                self._leave(client)
                try:
                    if isinstance(outcome, ConnectionLost):
                        raise outcome
                    code, encoded = made_of(outcome)
                except Exception as error:  # noqa: BLE001 - the outer edge of a call: answered and logged once
                    refused = refusal_of(error) if isinstance(error, RmqError) else _failed(method.name, call, error)
                    code = refused.code
                    encoded = method.response(status=status(code, refused.text)).SerializeToString()
                if self.answered is not None:
                    self.answered[method.name, name_of(code)] += 1
                write(encoded)

            return answered

        try:
            is_begun = begin(call, client, content, answer)
        except (RmqError, DecodeError):
            is_begun = False
        finally:
            if not is_begun:
                self._leave(client)
        return is_begun

    def handle_gathered(self) -> None:
        """Handle the broker requests of the calls in one read."""
        if (backend := self._backend.at_once) is not None:
            backend.handle_gathered()

    async def receive(self, method: Method, call: Call, asked: Any, write: Write, write_framed: WriteFramed) -> None:
        """Answer a ReceiveMessage: a status, messages, the time. Raises CallEnded: the client has disconnected."""
        if self.answered is not None:
            write = self._counted(method.name, self.answered, write)
        try:
            with self._entered(call, await self._signer(method.name, call, asked)) as client:
                try:
                    await self.receiving.receive(call, client, asked, write, write_framed)
                except RmqError as error:
                    refused = refusal_of(error)
                    await write(_ReceiveResponse(status=status(refused.code, refused.text)))
        except CallEnded:
            raise
        except RmqError as error:
            refused = refusal_of(error)
            return await write(_ReceiveResponse(status=status(refused.code, refused.text)))
        except Exception as error:  # noqa: BLE001 - the outer edge of a call: answered and logged once
            refused = _failed(method.name, call, error)
            return await write(_ReceiveResponse(status=status(refused.code, refused.text)))
        now = _ReceiveResponse()
        now.delivery_timestamp.FromMilliseconds(self._clock.now_ms())
        return await write(now)

    async def telemetry(self, call: Call, commands: AsyncIterator[Any], write: Write) -> None:
        """Answer a client's Telemetry stream until it ends. Raises StreamFailed."""
        stream = Stream()
        writing = asyncio.create_task(stream.write_all(write), name="Telemetry stream")
        client: Client | None = None
        try:
            async for command in _heard(commands):
                try:
                    with self._entered(call, await self._signer("Telemetry", call, command)) as client:
                        answer = await self._telemetry.take(call, client, command, stream)
                except Refused as error:
                    if error.code in _ENDING:
                        stream.send(_Command(status=status(error.code, error.text)))
                        break
                    text = f"process client telemetryCommand failed. {error.text}"
                    raise StreamFailed(text, is_argument=40000 <= error.code < 41000) from None
                except Exception as error:  # noqa: BLE001 - the outer edge of a stream: reported and logged once
                    text = f"process client telemetryCommand failed. {_failed('Telemetry', call, error).text}"
                    raise StreamFailed(text, is_argument=False) from None
                if answer is not None:
                    stream.send(answer)
            stream.end()
            await writing
        finally:
            writing.cancel()
            # Do not remove a newer stream that the client has opened meanwhile.
            if client is not None and client.stream is stream:
                client.stream = None
                if client.lite is not None and not self.stopping.is_set():
                    self._tasks.start(self._lite.remove(client), f"removal of lite consumer {client.id}")

    @property
    def held_messages(self) -> int:
        """Number of messages that are renewed for push consumers."""
        return len(self.receiving.renewals)

    # -- inside

    @staticmethod
    def _counted(name: str, answered: Counter[tuple[str, str]], write: Write) -> Write:
        async def counting(item: Any) -> None:
            if item.HasField("status"):
                answered[name, name_of(item.status.code)] += 1
            await write(item)

        return counting

    async def _signer(self, name: str, call: Call, asked: Any) -> str | None:
        """Return the user who signed a call, or None if authentication is off. Raises Refused: no permission."""
        backend = self._backend
        # Authenticate before adding the client: unauthenticated callers must neither fill the table nor use up the
        # call limit of another client.
        user = await backend.identify(call.metadata)
        client = self.clients.find(call.metadata.get("x-mq-client-id", ""))
        if client is not None:
            self.clients.check_user(client, user)
        if backend.has_policies:
            wanted = wanted_by(name, asked)
            if name == "NotifyClientTermination" and client is not None:
                # The call removes the client from its own group and topics, even if the request names other groups.
                wanted += wanted_of(client.group, client.producers)
            wanted += await self._wanted_parent(name, asked)
            await backend.authorize(user, wanted, (call.peername[0],))
        return user

    async def _wanted_parent(self, name: str, asked: Any) -> list[Wanted]:
        """Return the right to the parent topic that Telemetry and Heartbeat of a lite consumer need. The reference
        requires only the group."""
        if name == "Heartbeat":
            client_type, group = asked.client_type, asked.group.name
        elif name == "Telemetry" and asked.HasField("settings"):
            client_type, group = asked.settings.client_type, asked.settings.subscription.group.name
        else:
            return []
        config = await self._backend.group(group) if client_type in LITE_CONSUMERS else None
        return [] if config is None or config.lite_parent is None else wanted_topic(config.lite_parent)

    def _client_of(self, call: Call, user: str | None) -> Client:
        """Return the client of a call. Raises Refused."""
        client_id = call.metadata.get("x-mq-client-id", "")
        if not client_id.strip():
            raise Refused(Code.CLIENT_ID_REQUIRED, "client id cannot be empty")
        return self.clients.called(client_id, call.peername, user)

    def _enter(self, client: Client) -> None:
        """Count a call on the fast path."""
        client.calls += 1
        self._under_way += 1
        self._idle.clear()

    def _leave(self, client: Client) -> None:
        client.calls -= 1
        self._under_way -= 1
        assert client.calls >= 0 <= self._under_way, "every finished call was counted"
        if not self._under_way:
            self._idle.set()

    @contextmanager
    def _entered(self, call: Call, user: str | None) -> Iterator[Client]:
        """Provide the client of a call, and count the call as active in the block. Raises Refused."""
        client = self._client_of(call, user)
        client.calls += 1
        try:
            yield client
        finally:
            client.calls -= 1
            assert client.calls >= 0, "every finished call was counted"

    async def _renew(self) -> None:
        online = {client.id for client in self.clients if client.is_online}
        await self.receiving.renewals.round(online)

    def _gone(self, client_id: str) -> None:
        if not self.stopping.is_set():
            self._tasks.start(self.receiving.renewals.release(client_id), f"what {client_id} held")


async def _heard(commands: AsyncIterator[Any]) -> AsyncIterator[Any]:
    """Yield the commands of a Telemetry stream; stop if no first command arrives within `CLIENT_SILENT_MS_MAX`."""
    try:
        async with asyncio.timeout(CLIENT_SILENT_MS_MAX / 1000):
            first = await anext(commands, None)
    except TimeoutError:
        return
    if first is not None:
        yield first
    async for command in commands:
        yield command


def _failed(name: str, call: Call, error: Exception) -> Refused:
    _log.error("%s of %s failed", name, call.peername[0], exc_info=error)
    return Refused(Code.INTERNAL_SERVER_ERROR, f"{error}. {type(error).__name__}.")

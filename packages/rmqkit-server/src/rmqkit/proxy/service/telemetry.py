"""Telemetry, Heartbeat, NotifyClientTermination, and requests of tools to clients (``ClientActivity``).

A client opens one stream and sends its settings on it. The endpoint answers before it registers the client at brokers,
because SDKs wait for the answer. Requests of brokers to the client use the stream, too: check-backs of half messages,
requests to handle a message now, and requests for stack traces. Source: grpc.md §5.3, §5.12, §7, §10.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from typing import Any

import msgspec

from rmqkit.errors import ProtocolError, RmqError
from rmqkit.protocol import fastjson
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import Command, decode_header_leniently, reply
from rmqkit.protocol.properties import decode_properties
from rmqkit.protocol.record import decode_record
from rmqkit.protocol.schemas.clients import ConsumeMessageDirectlyResult, ConsumerRunningInfo, RunningInfoRequest
from rmqkit.protocol.schemas.groups import SubscriptionGroupConfig
from rmqkit.protocol.schemas.lite import NotifyUnsubscribeLiteRequest
from rmqkit.proxy.backend import Backend, OnRequest
from rmqkit.proxy.schema.checks import check_group
from rmqkit.proxy.schema.messages import message_class
from rmqkit.proxy.schema.records import message_of
from rmqkit.proxy.schema.status import OK, Code, Refused
from rmqkit.proxy.service.client_settings import (
    CONSUMERS,
    check_settings,
    language_of,
    merge,
    mode_fault,
    version_of,
)
from rmqkit.proxy.service.clients import Call, Client, Stream
from rmqkit.proxy.service.lite_subscriptions import LiteSubscriptions
from rmqkit.proxy.service.sending import Sending
from rmqkit.remoting.tasks import Tasks

__all__ = ["Telemetry"]

_log = logging.getLogger(__name__)

_Command = message_class("TelemetryCommand")
_HeartbeatResponse = message_class("HeartbeatResponse")
_TerminationResponse = message_class("NotifyClientTerminationResponse")

_OWN_PROPERTY = "client."
"""The prefix of a client's own properties in its running info."""

_RESULTS = {
    Code.OK: "CR_SUCCESS",
    Code.FAILED_TO_CONSUME_MESSAGE: "CR_LATER",
    Code.MESSAGE_CORRUPTED: "CR_RETURN_NULL",
}


class Telemetry:
    """Settings, heartbeats, and requests to clients."""

    def __init__(self, backend: Backend, sending: Sending, lite: LiteSubscriptions, tasks: Tasks) -> None:
        self._backend = backend
        self._lite = lite
        self._sending = sending
        self._tasks = tasks
        self._nonces = itertools.count()

    async def take(self, call: Call, client: Client, command: Any, stream: Stream) -> Any | None:
        """Handle one command of a client's stream, and return the answer, if any. If the command has valid settings,
        the stream becomes the client's stream. Answers to requests are accepted only on the client's stream.
        Raises Refused: the caller must close the stream."""
        match command.WhichOneof("command"):
            case "settings":
                answer = await self._settings(call, client, command.settings)
                client.stream = stream
                return answer
            case "thread_stack_trace" if client.stream is stream:
                client.answered(command.thread_stack_trace.nonce, command)
            case "verify_message_result" if client.stream is stream:
                client.answered(command.verify_message_result.nonce, command)
        return None

    async def _settings(self, call: Call, client: Client, settings: Any) -> Any:
        check_settings(settings)
        client.clients.hold(client)
        client.language = language_of(call.metadata.get("x-mq-language", ""))
        client.version = version_of(call.metadata.get("x-mq-client-version", ""))
        group = settings.subscription.group.name
        config = await self._backend.group(group) or SubscriptionGroupConfig()
        if settings.HasField("subscription") and (fault := mode_fault(settings.client_type, group, config)) is not None:
            raise Refused(Code.BAD_REQUEST, fault)
        # Set before the registration at brokers, because the first receive may arrive before brokers answer.
        client.set_settings(merged := merge(settings, config))
        self._tasks.start(self._register(client, settings), f"registration of {client.id}")
        return _Command(status=OK, settings=merged)

    async def _register(self, client: Client, settings: Any) -> None:
        try:
            await client.clients.take_settings(client, settings)
            if client.is_lite:
                await self._lite.restore(client)
        except RmqError as error:
            _log.warning("client %s is not registered until its next heartbeat: %s", client.id, error)

    async def heartbeat(self, call: Call, client: Client, asked: Any) -> Any:
        """Renew the registration of a client. A consumer that the endpoint has forgotten is registered from the fields
        of the heartbeat, because no SDK sends its settings again after an error."""
        if client.settings is not None and client.settings.HasField("publishing"):
            topics = [topic.name for topic in client.settings.publishing.topics]
            await client.clients.register(client, topics, None)
            return _HeartbeatResponse(status=OK)
        if client.settings is None and asked.client_type not in CONSUMERS:
            raise Refused(Code.UNRECOGNIZED_CLIENT_TYPE, "cannot find client settings for this client")
        if client.settings is None:
            client.language = language_of(call.metadata.get("x-mq-language", ""))
            client.version = version_of(call.metadata.get("x-mq-client-version", ""))
        group = check_group(asked.group.name)
        client_type = asked.client_type if client.settings is None else client.settings.client_type
        config = await self._backend.group(group) or SubscriptionGroupConfig()
        if (fault := mode_fault(client_type, group, config)) is not None:
            raise Refused(Code.UNRECOGNIZED_CLIENT_TYPE, fault)
        await client.clients.register(client, (), group, asked.client_type)
        return _HeartbeatResponse(status=OK)

    async def terminate(self, client: Client, asked: Any) -> Any:
        if asked.HasField("group"):
            check_group(asked.group.name)
        await self._lite.forget(client)
        await client.clients.leave(client)
        return _TerminationResponse(status=OK)

    # -- notices and requests of brokers to clients

    def on_request(self, client: Client) -> OnRequest:
        """Return the handler of brokers' commands to a client. It ignores commands that have no equivalent in gRPC."""

        def take(command: Command) -> asyncio.Future[Command] | None:
            match command.code:
                case RequestCode.CHECK_TRANSACTION_STATE:
                    try:
                        self._sending.check_back(client, command)
                    except ProtocolError as error:
                        _log.warning("a check-back for client %s cannot be read: %s", client.id, error)
                case RequestCode.CONSUME_MESSAGE_DIRECTLY:
                    return self._tasks.own(self._verify(client, command), f"message for {client.id} to verify")
                case RequestCode.NOTIFY_UNSUBSCRIBE_LITE:
                    self._unsubscribe(client, decode_header_leniently(command, NotifyUnsubscribeLiteRequest))
                case RequestCode.GET_CONSUMER_RUNNING_INFO:
                    return self._tasks.own(self._running_info(client, command), f"threads of {client.id}")
            return None

        return take

    @staticmethod
    def _unsubscribe(client: Client, header: NotifyUnsubscribeLiteRequest) -> None:
        """Pass on that another client has taken a lite topic (``notify_unsubscribe_lite_command``)."""
        if client.lite is not None:
            client.lite.names -= {header.lite_topic}
        # Without a stream the client learns it from the answer to its next COMPLETE_ADD: the broker repeats the notice.
        if client.stream is not None:
            command = _Command()
            command.notify_unsubscribe_lite_command.lite_topic = header.lite_topic
            client.stream.send(command)

    async def _verify(self, client: Client, command: Command) -> Command:
        """Let a client handle a message now (``verify_message_command``), and return the result."""
        nonce = str(next(self._nonces))
        asking = _Command()
        asking.verify_message_command.nonce = nonce
        record = decode_record(command.payload)
        message = message_of(record, decode_properties(record.properties), record.topic)
        asking.verify_message_command.message.CopyFrom(message)
        answered = await self._relay(client, command, asking, nonce)
        if isinstance(answered, Command):
            return answered
        result = ConsumeMessageDirectlyResult(
            consume_result=_RESULTS.get(answered.status.code), remark="from gRPC client"
        )
        return reply(command, body=msgspec.json.encode(result))

    async def _running_info(self, client: Client, command: Command) -> Command:
        """Return the running info of a client: its ``client_properties``, and its stack on request
        (``print_thread_stack_trace_command``)."""
        info = ConsumerRunningInfo(properties={"PROP_CONSUMER_CLIENT_TYPE": "gRPC"})
        if client.settings is not None:
            # The client's own words, which are for people only: no permission may depend on them.
            own = client.settings.client_properties.items()
            info.properties |= {f"{_OWN_PROPERTY}{key}": value for key, value in own}
        if decode_header_leniently(command, RunningInfoRequest).jstack_enable:
            nonce = str(next(self._nonces))
            asking = _Command()
            asking.print_thread_stack_trace_command.nonce = nonce
            answered = await self._relay(client, command, asking, nonce)
            if isinstance(answered, Command):
                return answered
            info.jstack = answered.thread_stack_trace.thread_stack_trace
        return reply(command, body=fastjson.dumps(info))

    @staticmethod
    async def _relay(client: Client, command: Command, asking: Any, nonce: str) -> Any:
        """Return the client's answer, or an error answer for the broker if the client does not answer."""
        try:
            return await client.relay(asking, nonce)
        except TimeoutError:
            return reply(command, ResponseCode.SYSTEM_BUSY, "call remote timeout")
        except Refused as error:
            return reply(command, ResponseCode.SYSTEM_ERROR, error.text)

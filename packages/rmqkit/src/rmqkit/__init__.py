"""RocketMQ-compatible messaging in Python.

The public names are loaded at their first use, which makes the import of the package fast::

    from rmqkit import Message, Producer
"""

from __future__ import annotations

import importlib
from pkgutil import extend_path
from typing import TYPE_CHECKING, Any

# rmqkit-store, rmqkit-server and other distributions add modules to this package. Wheels install the modules into this
# folder. Editable installations have separate folders.
__path__ = extend_path(__path__, __name__)

if TYPE_CHECKING:
    from rmqkit import streams as streams
    from rmqkit import sync as sync
    from rmqkit.client.connect import ConnectedClients as ConnectedClients
    from rmqkit.client.connect import connect as connect
    from rmqkit.client.consumer import allocate as allocate
    from rmqkit.client.consumer.consume import ConsumeLater as ConsumeLater
    from rmqkit.client.consumer.consume import Reject as Reject
    from rmqkit.client.consumer.dedupe import RedisDedupe as RedisDedupe
    from rmqkit.client.consumer.dedupe import SqliteDedupe as SqliteDedupe
    from rmqkit.client.consumer.pull import PullConsumer as PullConsumer
    from rmqkit.client.consumer.pull import PullResult as PullResult
    from rmqkit.client.consumer.push import PushConsumer as PushConsumer
    from rmqkit.client.consumer.retry import Retry as Retry
    from rmqkit.client.lite.consumer import Last as Last
    from rmqkit.client.lite.consumer import LiteConsumer as LiteConsumer
    from rmqkit.client.lite.consumer import LiteMessage as LiteMessage
    from rmqkit.client.observe.hooks import ConsumeOutcome as ConsumeOutcome
    from rmqkit.client.observe.hooks import Consumption as Consumption
    from rmqkit.client.observe.hooks import Hook as Hook
    from rmqkit.client.observe.hooks import Recall as Recall
    from rmqkit.client.observe.hooks import Sending as Sending
    from rmqkit.client.observe.hooks import SendOutcome as SendOutcome
    from rmqkit.client.observe.hooks import SendResult as SendResult
    from rmqkit.client.observe.hooks import SendStatus as SendStatus
    from rmqkit.client.observe.hooks import TransactionEnd as TransactionEnd
    from rmqkit.client.observe.status import BrokerStatus as BrokerStatus
    from rmqkit.client.observe.status import MemberStatus as MemberStatus
    from rmqkit.client.observe.status import ProducerStatus as ProducerStatus
    from rmqkit.client.observe.status import QueueState as QueueState
    from rmqkit.client.observe.status import QueueStatus as QueueStatus
    from rmqkit.client.pop.consumer import PopConsumer as PopConsumer
    from rmqkit.client.producer import selectors as selectors
    from rmqkit.client.producer.accumulator import SendManyFailed as SendManyFailed
    from rmqkit.client.producer.producer import Producer as Producer
    from rmqkit.client.producer.transaction import TransactionProducer as TransactionProducer
    from rmqkit.client.producer.transaction import TransactionResult as TransactionResult
    from rmqkit.client.producer.transaction import TransactionState as TransactionState
    from rmqkit.client.runtime.handlers import Reply as Reply
    from rmqkit.client.runtime.process import run as run
    from rmqkit.client.runtime.runtime import ClientRuntime as ClientRuntime
    from rmqkit.client.runtime.settings import Batching as Batching
    from rmqkit.client.runtime.settings import ClientSettings as ClientSettings
    from rmqkit.client.runtime.settings import Compressing as Compressing
    from rmqkit.client.runtime.settings import CompressionType as CompressionType
    from rmqkit.client.runtime.settings import HoldLimits as HoldLimits
    from rmqkit.client.runtime.settings import MessageModel as MessageModel
    from rmqkit.client.runtime.settings import Popping as Popping
    from rmqkit.client.runtime.settings import ProducerSettings as ProducerSettings
    from rmqkit.client.runtime.settings import PullConsumerSettings as PullConsumerSettings
    from rmqkit.client.runtime.settings import Pulling as Pulling
    from rmqkit.client.runtime.settings import PushConsumerSettings as PushConsumerSettings
    from rmqkit.client.runtime.settings import SendLimits as SendLimits
    from rmqkit.client.runtime.settings import StartFrom as StartFrom
    from rmqkit.client.runtime.settings import Tracing as Tracing
    from rmqkit.errors import BodyMismatch as BodyMismatch
    from rmqkit.errors import ClientError as ClientError
    from rmqkit.errors import ConnectFailed as ConnectFailed
    from rmqkit.errors import ConnectionLost as ConnectionLost
    from rmqkit.errors import EventIdIllegal as EventIdIllegal
    from rmqkit.errors import MessageIllegal as MessageIllegal
    from rmqkit.errors import NoRoute as NoRoute
    from rmqkit.errors import NotARequest as NotARequest
    from rmqkit.errors import PeerRefused as PeerRefused
    from rmqkit.errors import RemotingError as RemotingError
    from rmqkit.errors import ReplyTimedOut as ReplyTimedOut
    from rmqkit.errors import RequestTimedOut as RequestTimedOut
    from rmqkit.errors import RmqError as RmqError
    from rmqkit.errors import SendFailed as SendFailed
    from rmqkit.errors import SettingsError as SettingsError
    from rmqkit.errors import StreamExpired as StreamExpired
    from rmqkit.errors import TimeIllegal as TimeIllegal
    from rmqkit.protocol.message import Message as Message
    from rmqkit.protocol.message import ReceivedMessage as ReceivedMessage
    from rmqkit.protocol.schemas.clients import MessageQueue as MessageQueue
    from rmqkit.remoting.authentication import Credentials as Credentials
    from rmqkit.remoting.tls import Tls as Tls
    from rmqkit.rpc import PullStatus as PullStatus

_MODULES = """
rmqkit.client.connect ConnectedClients connect
rmqkit.client.producer.accumulator SendManyFailed
rmqkit.rpc PullStatus
rmqkit.client.consumer.consume ConsumeLater Reject
rmqkit.client.consumer.dedupe RedisDedupe SqliteDedupe
rmqkit.client.consumer.retry Retry
rmqkit.client.observe.hooks ConsumeOutcome Consumption Hook Recall SendOutcome Sending TransactionEnd
rmqkit.client.lite.consumer Last LiteConsumer LiteMessage
rmqkit.client.pop.consumer PopConsumer
rmqkit.client.producer.producer Producer
rmqkit.client.consumer.pull PullConsumer PullResult
rmqkit.client.consumer.push PushConsumer
rmqkit.client.runtime.handlers Reply
rmqkit.client.runtime.process run
rmqkit.client.runtime.runtime ClientRuntime
rmqkit.client.producer.sender SendResult SendStatus
rmqkit.client.runtime.settings Batching ClientSettings Compressing CompressionType HoldLimits MessageModel Popping
rmqkit.client.runtime.settings ProducerSettings PullConsumerSettings Pulling PushConsumerSettings SendLimits StartFrom
rmqkit.client.runtime.settings Tracing
rmqkit.remoting.authentication Credentials
rmqkit.remoting.tls Tls
rmqkit.client.observe.status BrokerStatus MemberStatus ProducerStatus QueueState QueueStatus
rmqkit.client.producer.transaction TransactionProducer TransactionResult TransactionState
rmqkit.errors BodyMismatch ClientError ConnectFailed ConnectionLost EventIdIllegal MessageIllegal NoRoute NotARequest
rmqkit.errors PeerRefused StreamExpired
rmqkit.errors RemotingError
rmqkit.errors ReplyTimedOut RequestTimedOut RmqError SendFailed SettingsError TimeIllegal
rmqkit.protocol.schemas.clients MessageQueue
rmqkit.protocol.message Message ReceivedMessage
"""
_SUBMODULES = {
    "allocate": "rmqkit.client.consumer.allocate",
    "selectors": "rmqkit.client.producer.selectors",
    "streams": "rmqkit.streams",
    "sync": "rmqkit.sync",
}
_HOMES = {name: module for module, *names in map(str.split, _MODULES.strip().splitlines()) for name in names}

__all__ = sorted((*_HOMES, *_SUBMODULES))


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        value: Any = importlib.import_module(_SUBMODULES[name])
    elif name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
    else:
        raise AttributeError(f"module 'rmqkit' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted((*globals(), *__all__))

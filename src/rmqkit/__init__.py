"""RocketMQ-compatible messaging in Python.

The names programs use are loaded when they are first touched, so that importing the package costs nothing::

    from rmqkit import Message, Producer
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rmqkit.client import allocate as allocate
    from rmqkit.client import selectors as selectors
    from rmqkit.client import sync as sync
    from rmqkit.client.batching import SendManyFailed as SendManyFailed
    from rmqkit.client.calls import PullStatus as PullStatus
    from rmqkit.client.consuming import ConsumeLater as ConsumeLater
    from rmqkit.client.hooks import ConsumeOutcome as ConsumeOutcome
    from rmqkit.client.hooks import Consumption as Consumption
    from rmqkit.client.hooks import Hook as Hook
    from rmqkit.client.hooks import Recall as Recall
    from rmqkit.client.hooks import Sending as Sending
    from rmqkit.client.hooks import SendOutcome as SendOutcome
    from rmqkit.client.hooks import TransactionEnd as TransactionEnd
    from rmqkit.client.pop_consumer import PopConsumer as PopConsumer
    from rmqkit.client.producer import Producer as Producer
    from rmqkit.client.pull_consumer import PullConsumer as PullConsumer
    from rmqkit.client.pull_consumer import PullResult as PullResult
    from rmqkit.client.push_consumer import PushConsumer as PushConsumer
    from rmqkit.client.request_reply import Reply as Reply
    from rmqkit.client.running import run as run
    from rmqkit.client.runtime import ClientRuntime as ClientRuntime
    from rmqkit.client.sender import SendResult as SendResult
    from rmqkit.client.sender import SendStatus as SendStatus
    from rmqkit.client.settings import ClientSettings as ClientSettings
    from rmqkit.client.settings import CompressionType as CompressionType
    from rmqkit.client.settings import MessageModel as MessageModel
    from rmqkit.client.settings import ProducerSettings as ProducerSettings
    from rmqkit.client.settings import PullConsumerSettings as PullConsumerSettings
    from rmqkit.client.settings import PushConsumerSettings as PushConsumerSettings
    from rmqkit.client.settings import StartFrom as StartFrom
    from rmqkit.client.status import BrokerStatus as BrokerStatus
    from rmqkit.client.status import MemberStatus as MemberStatus
    from rmqkit.client.status import ProducerStatus as ProducerStatus
    from rmqkit.client.status import QueueState as QueueState
    from rmqkit.client.status import QueueStatus as QueueStatus
    from rmqkit.client.transaction import TransactionProducer as TransactionProducer
    from rmqkit.client.transaction import TransactionResult as TransactionResult
    from rmqkit.client.transaction import TransactionState as TransactionState
    from rmqkit.errors import ClientError as ClientError
    from rmqkit.errors import ConnectFailed as ConnectFailed
    from rmqkit.errors import ConnectionLost as ConnectionLost
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
    from rmqkit.protocol.bodies.clients import MessageQueue as MessageQueue
    from rmqkit.protocol.message import Message as Message
    from rmqkit.protocol.message import ReceivedMessage as ReceivedMessage

_MODULES = """
rmqkit.client.batching SendManyFailed
rmqkit.client.calls PullStatus
rmqkit.client.consuming ConsumeLater
rmqkit.client.hooks ConsumeOutcome Consumption Hook Recall SendOutcome Sending TransactionEnd
rmqkit.client.pop_consumer PopConsumer
rmqkit.client.producer Producer
rmqkit.client.pull_consumer PullConsumer PullResult
rmqkit.client.push_consumer PushConsumer
rmqkit.client.request_reply Reply
rmqkit.client.running run
rmqkit.client.runtime ClientRuntime
rmqkit.client.sender SendResult SendStatus
rmqkit.client.settings ClientSettings CompressionType MessageModel ProducerSettings PullConsumerSettings
rmqkit.client.settings PushConsumerSettings StartFrom
rmqkit.client.status BrokerStatus MemberStatus ProducerStatus QueueState QueueStatus
rmqkit.client.transaction TransactionProducer TransactionResult TransactionState
rmqkit.errors ClientError ConnectFailed ConnectionLost MessageIllegal NoRoute NotARequest PeerRefused RemotingError
rmqkit.errors ReplyTimedOut RequestTimedOut RmqError SendFailed SettingsError
rmqkit.protocol.bodies.clients MessageQueue
rmqkit.protocol.message Message ReceivedMessage
"""
_SUBMODULES = ("allocate", "selectors", "sync")
_HOMES = {name: module for module, *names in map(str.split, _MODULES.strip().splitlines()) for name in names}

__all__ = sorted((*_HOMES, *_SUBMODULES))


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        value: Any = importlib.import_module(f"rmqkit.client.{name}")
    elif name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
    else:
        raise AttributeError(f"module 'rmqkit' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted((*globals(), *__all__))

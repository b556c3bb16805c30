"""Types of parameters that a handler can declare: ``async def bill(order: Order, message: RocketMessage)``."""

from __future__ import annotations

from typing import Annotated

from faststream._internal.context import Context
from faststream.annotations import ContextRepo, Logger
from faststream.params import NoCast

from rmqkit.client.producer.producer import Producer as _Producer
from rmqkit.faststream.broker import RocketBroker as _Broker
from rmqkit.faststream.messages import RocketMessage as _Message

__all__ = ["ContextRepo", "Logger", "NoCast", "Producer", "RocketBroker", "RocketMessage"]

RocketMessage = Annotated[_Message, Context("message")]
RocketBroker = Annotated[_Broker, Context("broker")]
Producer = Annotated[_Producer, Context("broker.producer")]

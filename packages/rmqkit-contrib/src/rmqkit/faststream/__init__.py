"""A broker for FastStream applications::

    from faststream import FastStream
    from rmqkit.faststream import RocketBroker

    broker = RocketBroker("127.0.0.1:9876")
    app = FastStream(broker)

    @broker.subscriber("Orders", group="billing")
    @broker.publisher("Bills")
    async def bill(order: Order) -> Bill: ...

Run the application with ``faststream run``, and test it with `TestRocketBroker`. FastStream does the rest: decoding of
bodies, dependencies, middlewares, routers, the AsyncAPI page. This package needs the extra ``faststream``. The base
classes of brokers are internal to FastStream, so this package requires FastStream 0.7.

==============  ====================================================================================================
`broker`        `RocketBroker`, `RocketRouter`, and their common parts: the producer, one consumer for each group
`endpoints`     the subscribers and publishers, and their part of the AsyncAPI page
`messages`      messages for handlers, published messages, and the outcome of handlers for RocketMQ
`annotations`   types of handler parameters: `RocketMessage`, the broker, its producer
`testing`       `TestRocketBroker`, which calls handlers without a broker
==============  ====================================================================================================
"""

from __future__ import annotations

from rmqkit import extras

with extras.needed("faststream", "rmqkit.faststream"):
    from rmqkit.faststream.annotations import RocketMessage
    from rmqkit.faststream.broker import RocketBroker, RocketRouter
    from rmqkit.faststream.messages import RocketResponse
    from rmqkit.faststream.testing import TestRocketBroker

__all__ = ["RocketBroker", "RocketMessage", "RocketResponse", "RocketRouter", "TestRocketBroker"]

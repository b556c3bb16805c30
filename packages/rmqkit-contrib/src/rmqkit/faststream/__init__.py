"""A broker for FastStream applications::

    from faststream import FastStream
    from rmqkit.faststream import RocketBroker

    broker = RocketBroker("127.0.0.1:9876")
    app = FastStream(broker)

    @broker.subscriber("Orders", group="billing")
    @broker.publisher("Bills")
    async def bill(order: Order) -> Bill: ...

Run it with ``faststream run``, test it with `TestRocketBroker`. Everything else is FastStream's: what bodies become,
dependencies, middlewares, routers, the AsyncAPI page. Needs the extra ``faststream``. The base classes of brokers are
internal to FastStream, so this is made for its releases 0.7.

==============  ====================================================================================================
`broker`        `RocketBroker`, `RocketRouter`, and what they share: the producer, one consumer for each group
`endpoints`     what ``subscriber`` and ``publisher`` make: subscribers, publishers, their part of the AsyncAPI page
`messages`      the message a handler may ask for, what is published, and how a handler's outcome reaches RocketMQ
`annotations`   what handlers may ask for: `RocketMessage`, the broker, its producer
`testing`       `TestRocketBroker`: calls handlers without a broker
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

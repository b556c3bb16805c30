"""A transport for kombu, which makes RocketMQ a broker for Celery: ``broker_url = "rocketmq://127.0.0.1:9876//"``.

This package needs the extra ``celery``. Celery finds the transport automatically (`alias`); a program that uses only
kombu needs ``import rmqkit.kombu``. `transport` is the implementation.
"""

from __future__ import annotations

from rmqkit import extras

with extras.needed("celery", "rmqkit.kombu"):
    from rmqkit.kombu.alias import ALIAS

__all__ = ["ALIAS"]

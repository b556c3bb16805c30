"""A transport for kombu, and so a broker for Celery: ``broker_url = "rocketmq://127.0.0.1:9876//"``.

Needs the extra ``celery``. Celery finds the transport by itself (`alias`); a program that uses kombu alone says
``import rmqkit.kombu``. `transport` is how it works.
"""

from __future__ import annotations

from rmqkit import extras

with extras.needed("celery", "rmqkit.kombu"):
    from rmqkit.kombu.alias import ALIAS

__all__ = ["ALIAS"]

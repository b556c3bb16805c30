"""Registration of the scheme ``rocketmq://``, which runs when kombu loads its serializers, for example in Celery.

kombu has entry points for serializers, but not for transports, and refuses URLs with unknown schemes. Therefore rmqkit
has the entry point of a serializer (kombu's own JSON under another name). Its import registers the transport. Every
program with kombu and rmqkit imports this module, so it imports nothing else.
"""

from __future__ import annotations

from kombu.transport import TRANSPORT_ALIASES
from kombu.utils.json import dumps, loads

__all__ = ["ALIAS", "SERIALIZER"]

ALIAS = "rocketmq"
SERIALIZER = (dumps, loads, "application/x-rmqkit-json", "utf-8")

TRANSPORT_ALIASES.setdefault(ALIAS, "rmqkit.kombu.transport:Transport")

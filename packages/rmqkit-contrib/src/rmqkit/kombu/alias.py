"""Makes the scheme ``rocketmq://`` known to kombu, when Celery or another program first imports its serializers.

kombu has entry points for serializers and none for transports, and takes no transport from a URL that it does not know.
So rmqkit has the entry point of a serializer (kombu's own JSON under another name, which nobody has to use), and the
transport's name comes along with it. Loaded in every program with kombu and rmqkit installed: it imports nothing else.
"""

from __future__ import annotations

from kombu.transport import TRANSPORT_ALIASES
from kombu.utils.json import dumps, loads

__all__ = ["ALIAS", "SERIALIZER"]

ALIAS = "rocketmq"
SERIALIZER = (dumps, loads, "application/x-rmqkit-json", "utf-8")

TRANSPORT_ALIASES.setdefault(ALIAS, "rmqkit.kombu.transport:Transport")

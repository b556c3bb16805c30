"""Settings of our clients on a machine that does much else, where what is tested is not how long they wait.

With the defaults of 3 s a late answer has a message sent twice, or makes a program give up.
"""

from __future__ import annotations

from typing import Any

from rmqkit import ProducerSettings, PullConsumerSettings, PushConsumerSettings

TIMEOUT_MS = 60_000
"""Of one request; only a test that fails waits so long."""


def producing(**settings: Any) -> ProducerSettings:
    return ProducerSettings(**{"send_timeout_ms": TIMEOUT_MS, "api_timeout_ms": TIMEOUT_MS, **settings})


def pulling(**settings: Any) -> PullConsumerSettings:
    return PullConsumerSettings(**{"request_timeout_ms": TIMEOUT_MS, "api_timeout_ms": TIMEOUT_MS, **settings})


def pushing(**settings: Any) -> PushConsumerSettings:
    return PushConsumerSettings(**{"api_timeout_ms": TIMEOUT_MS, **settings})

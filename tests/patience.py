"""Settings of our clients on a machine that does much else, where what is tested is not how long they wait.

With the defaults of 3 s a late answer has a message sent twice, or makes a program give up.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

from rmqkit import ProducerSettings, PullConsumerSettings, PushConsumerSettings, rpc
from rmqkit.admin import Admin
from rmqkit.admin.calls import AdminCalls
from rmqkit.broker import registration
from rmqkit.broker.pop import handlers as pop
from rmqkit.client.consumer import consume as consuming
from rmqkit.client.consumer import pull as pull_consumer
from rmqkit.client.consumer import push as push_consumer
from rmqkit.client.producer import producer
from rmqkit.client.runtime import runtime
from rmqkit.client.runtime.settings import ClientSettings, check
from rmqkit.namesrv import brokers
from rmqkit.remoting import client
from rmqkit.remoting.client import RemotingClient
from rmqkit.store.log import commit_log

TIMEOUT_MS = 60_000
"""Of one request; only a test that fails waits so long."""


def producing(**settings: Any) -> ProducerSettings:
    return ProducerSettings(
        **{
            "send_timeout_ms": TIMEOUT_MS,
            "try_timeout_ms": TIMEOUT_MS,
            "api_timeout_ms": TIMEOUT_MS,
            **settings,
        }
    )


def pulling(**settings: Any) -> PullConsumerSettings:
    return PullConsumerSettings(**{"request_timeout_ms": TIMEOUT_MS, "api_timeout_ms": TIMEOUT_MS, **settings})


def pushing(**settings: Any) -> PushConsumerSettings:
    return PushConsumerSettings(**{"api_timeout_ms": TIMEOUT_MS, **settings})


_TIMES_MS = (
    (client, "CONNECT_TIMEOUT_MS"),
    (rpc, "OFFSET_TIMEOUT_MS"),
    (rpc, "SEND_BACK_TIMEOUT_MS"),
    (brokers, "NOTICE_TIMEOUT_MS"),
    (registration, "_NAMESAKE_TIMEOUT_MS"),
    (pop, "_LATE_MS"),
)
_TIMES_SECONDS = ((registration, "_SETTLED_SECONDS"), (commit_log, "_CREATE_TIMEOUT_SECONDS"))


_patches = pytest.MonkeyPatch()


def be_patient() -> None:
    """Let clients, brokers and `Admin` of this process wait `TIMEOUT_MS` where they are left what they wait by default,
    which is 0.3 to 10 s: also brokers for the next log file, and a pop for being looked at."""
    for times, value in ((_TIMES_MS, TIMEOUT_MS), (_TIMES_SECONDS, TIMEOUT_MS / 1000)):
        for module, name in times:
            _patches.setattr(module, name, value)
    _patches.setattr(client, "_PATIENCE_S", 10.0)
    _patches.setattr(RemotingClient.connection, "__defaults__", (TIMEOUT_MS,))
    for module in (producer, pull_consumer, push_consumer):
        _patches.setattr(module, "check", lambda settings: _patient(check(settings)))
    _patches.setattr(runtime, "ClientSettings", functools.partial(ClientSettings, api_timeout_ms=TIMEOUT_MS))
    _patches.setattr(consuming, "ProducerSettings", producing)
    for made in (Admin, AdminCalls):
        _patches.setitem(made.__init__.__kwdefaults__, "timeout_ms", float(TIMEOUT_MS))


@contextmanager
def as_users_have_it() -> Iterator[None]:
    """Defaults as they are, for tests of what happens when nobody answers."""
    _patches.undo()
    try:
        yield
    finally:
        be_patient()


def _patient(settings: ClientSettings) -> ClientSettings:
    late = [
        field.name
        for field in msgspec.structs.fields(settings)
        if field.name in ("api_timeout_ms", "send_timeout_ms", "try_timeout_ms", "request_timeout_ms")
        and getattr(settings, field.name) == field.default
    ]
    return msgspec.structs.replace(settings, **dict.fromkeys(late, TIMEOUT_MS))

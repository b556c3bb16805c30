"""Long time-outs of our clients for tests on a busy machine that do not test the time-outs themselves.

With the default of 3 s a late answer makes a client send a message twice, or give up. Programs that tests start import
this module, too. So it does not import pytest, which takes as long as all of rmqkit.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import msgspec

from rmqkit import ProducerSettings, PullConsumerSettings, PushConsumerSettings
from rmqkit.client.consumer import consume as consuming
from rmqkit.client.consumer import pull as pull_consumer
from rmqkit.client.consumer import push as push_consumer
from rmqkit.client.producer import producer
from rmqkit.client.runtime import runtime
from rmqkit.client.runtime.settings import ClientSettings, check
from rmqkit.remoting.client import RemotingClient
from tests.sources import is_installed

TIMEOUT_MS = 60_000
"""Time-out of one request. Only a test that fails waits as long."""


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


_MS, _SECONDS = TIMEOUT_MS, TIMEOUT_MS / 1000
_TIMES = {
    "rmqkit": {
        "rmqkit.remoting.client.CONNECT_TIMEOUT_MS": _MS,
        "rmqkit.rpc.OFFSET_TIMEOUT_MS": _MS,
        "rmqkit.rpc.SEND_BACK_TIMEOUT_MS": _MS,
        "rmqkit.remoting.client._PATIENCE_S": 10.0,
    },
    "rmqkit-store": {"rmqkit.store.log.commit_log._CREATE_TIMEOUT_SECONDS": _SECONDS},
    "rmqkit-server": {
        "rmqkit.namesrv.brokers.NOTICE_TIMEOUT_MS": _MS,
        "rmqkit.broker.registration._NAMESAKE_TIMEOUT_MS": _MS,
        "rmqkit.broker.registration._SETTLED_SECONDS": _SECONDS,
        "rmqkit.broker.pop.handlers._LATE_MS": _MS,
    },
}
"""Package → the default time-outs of its modules."""

_patches = ExitStack()


def be_patient() -> None:
    """Let clients, brokers and `Admin` of this process wait `TIMEOUT_MS` wherever a default of 0.3 to 10 s applies.

    The waits of a broker for its next log file, and of a pop before it runs, become as long."""
    for package, times in _TIMES.items():
        if is_installed(package):
            for name, value in times.items():
                _patches.enter_context(mock.patch(name, value))
    changed: list[tuple[Any, str, Any]] = [
        (RemotingClient.connection, "__defaults__", (TIMEOUT_MS,)),
        *((module, "check", _checked) for module in (producer, pull_consumer, push_consumer)),
        (runtime, "ClientSettings", functools.partial(ClientSettings, api_timeout_ms=TIMEOUT_MS)),
        (consuming, "ProducerSettings", producing),
    ]
    for owner, name, value in changed:
        _patches.enter_context(mock.patch.object(owner, name, value))
    if is_installed("rmqkit-tools"):
        from rmqkit.admin import Admin
        from rmqkit.admin.calls import AdminCalls

        for made in (Admin, AdminCalls):
            _patches.enter_context(mock.patch.dict(made.__init__.__kwdefaults__, timeout_ms=float(TIMEOUT_MS)))


@contextmanager
def as_users_have_it() -> Iterator[None]:
    """Restore the defaults, for tests of what happens when no server answers."""
    _patches.close()
    try:
        yield
    finally:
        be_patient()


def _checked(settings: ClientSettings) -> ClientSettings:
    return _patient(check(settings))


def _patient(settings: ClientSettings) -> ClientSettings:
    late = [
        field.name
        for field in msgspec.structs.fields(settings)
        if field.name in ("api_timeout_ms", "send_timeout_ms", "try_timeout_ms", "request_timeout_ms")
        and getattr(settings, field.name) == field.default
    ]
    return msgspec.structs.replace(settings, **dict.fromkeys(late, TIMEOUT_MS))

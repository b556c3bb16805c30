"""Settings that clients send and get back (``GrpcClientSettingsManager``).

The answer repeats the client's own settings. The server overwrites the number and the waits of attempts, the sizes,
and the order of consumption. SDKs need different parts of the settings, so the answer contains all parts.
Source: grpc.md §2.1, §7.2, §7.3.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rmqkit.protocol.codes import CURRENT_VERSION, LANGUAGES, version_number
from rmqkit.protocol.names import LITE_TOPIC_BYTES_MAX
from rmqkit.protocol.schemas.groups import CustomizedRetryPolicy, ExponentialRetryPolicy, SubscriptionGroupConfig
from rmqkit.proxy.schema.checks import BODY_BYTES_MAX, check_group, check_topic, sql_or_tags
from rmqkit.proxy.schema.messages import message_class
from rmqkit.proxy.schema.status import Code, Refused

__all__ = [
    "CONSUMERS",
    "LITE_CONSUMERS",
    "PUSH_CONSUMER",
    "SIMPLE_CONSUMER",
    "check_settings",
    "language_of",
    "merge",
    "mode_fault",
    "retry_waits_ms",
    "version_of",
]

PUSH_CONSUMER, SIMPLE_CONSUMER = 2, 3
LITE_CONSUMERS = frozenset((5, 6))
"""LITE_PUSH_CONSUMER and LITE_SIMPLE_CONSUMER."""
CONSUMERS = frozenset((PUSH_CONSUMER, SIMPLE_CONSUMER)) | LITE_CONSUMERS
"""The client types of consumers that are served."""
SETTINGS_BYTES_MAX = 64 << 10
SUBSCRIPTIONS_MAX = 1000
_PRODUCER_TRIES = 3
_PRODUCER_BACKOFF_MS = 10, 1000, 2.0
_BATCH_SIZE = 32
_POLLING_SECONDS = 20
_EXPONENTIAL = "EXPONENTIAL"
_TRIES_TOLD_MAX = 64
_INT32_MAX = (1 << 31) - 1

_PROPERTIES_MAX, _PROPERTIES_BYTES_MAX = 32, 4096
_KEY_CHARS_MAX, _VALUE_CHARS_MAX = 64, 256
_PROPERTY_KEY = re.compile(r"[a-zA-Z][a-zA-Z0-9_.-]{0,63}")

_Settings = message_class("Settings")


def merge(settings: Any, config: SubscriptionGroupConfig) -> Any:
    """Return the settings to send back to a client. ``config``: the configuration of a consumer's group."""
    merged = _Settings()
    merged.CopyFrom(settings)
    if settings.HasField("publishing"):
        _merge_producer(merged)
    else:
        _merge_consumer(merged, config)
    merged.metric.on = False
    return merged


def language_of(metadata_language: str) -> str:
    """Return the language to show in tools; an unknown language is OTHER (the reference fails)."""
    return metadata_language if metadata_language in LANGUAGES else "OTHER"


def version_of(metadata_version: str) -> int:
    """Return the version number for a text such as ``5.1.2``, or the endpoint's own version for any other text."""
    parts = metadata_version.split(".")
    if len(parts) == 3 and all(part.isdecimal() and len(part) < 4 for part in parts) and 4 <= int(parts[0]) < 10:
        major, minor, patch = map(int, parts)
        if minor < 10 and patch < 10:
            return version_number(major, minor, patch)
    return CURRENT_VERSION


def check_settings(settings: Any) -> None:
    """Check a client's settings. Raises Refused, with BAD_REQUEST, INVALID_CLIENT_PROPERTIES or
    INTERNAL_SERVER_ERROR."""
    if settings.ByteSize() > SETTINGS_BYTES_MAX:
        raise Refused(Code.BAD_REQUEST, f"settings of {settings.ByteSize()} bytes: {SETTINGS_BYTES_MAX} are read")
    _check_properties(settings.client_properties)
    if settings.HasField("publishing"):
        if len(settings.publishing.topics) > SUBSCRIPTIONS_MAX:
            raise Refused(Code.BAD_REQUEST, f"settings with more than {SUBSCRIPTIONS_MAX} topics")
        for topic in settings.publishing.topics:
            check_topic(topic.name)
        return
    if not settings.HasField("subscription"):
        raise Refused(Code.BAD_REQUEST, "there is no publishing or subscription data in settings")
    check_group(settings.subscription.group.name)
    if len(settings.subscription.subscriptions) > SUBSCRIPTIONS_MAX:
        raise Refused(Code.BAD_REQUEST, f"settings with more than {SUBSCRIPTIONS_MAX} subscriptions")
    for entry in settings.subscription.subscriptions:
        sql_or_tags(entry.expression)
    if settings.client_type not in CONSUMERS:
        name = _client_type_name(settings.client_type)
        raise Refused(Code.INTERNAL_SERVER_ERROR, f"Client type is not consumer, type: {name}")


def mode_fault(client_type: int, group: str, config: SubscriptionGroupConfig) -> str | None:
    """Return the reason why a group does not serve consumers of a type, or None. Source: lite.md §6."""
    if config.lite_parent is not None:
        return None if client_type in LITE_CONSUMERS else f"lite group must use LITE mode: {group}"
    return f"regular group cannot use LITE mode: {group}" if client_type in LITE_CONSUMERS else None


def _check_properties(properties: Mapping[str, str]) -> None:
    """Check the properties with which a program describes its client. Raises Refused."""
    fault = ""
    if len(properties) > _PROPERTIES_MAX:
        fault = f"{len(properties)} client properties: at most {_PROPERTIES_MAX} are accepted"
    for key, value in properties.items():
        if not _PROPERTY_KEY.fullmatch(key):
            fault = f"client property {key[:_KEY_CHARS_MAX]!r}: a key has 1 to 64 characters [a-zA-Z][a-zA-Z0-9_.-]*"
        elif len(value) > _VALUE_CHARS_MAX:
            fault = f"client property {key}: {len(value)} characters, at most {_VALUE_CHARS_MAX} are accepted"
    size = _Settings(client_properties=properties).ByteSize()
    if not fault and size > _PROPERTIES_BYTES_MAX:
        fault = f"client properties of {size} bytes: at most {_PROPERTIES_BYTES_MAX} are accepted"
    if fault:
        raise Refused(Code.INVALID_CLIENT_PROPERTIES, fault)


def _client_type_name(number: int) -> str:
    names = message_class("Settings").DESCRIPTOR.fields_by_name["client_type"].enum_type.values_by_number
    return names[number].name if number in names else str(number)


def retry_waits_ms(config: SubscriptionGroupConfig) -> Sequence[int]:
    """Return the waits of a group before each redelivery, in ms."""
    policy = config.group_retry_policy
    if policy is None or policy.type != _EXPONENTIAL:
        customized = policy.customized_retry_policy if policy is not None else None
        return (customized or CustomizedRetryPolicy()).next or CustomizedRetryPolicy().next
    steps = policy.exponential_retry_policy or ExponentialRetryPolicy()
    waits, wait_ms = [], steps.initial
    for _ in range(_TRIES_TOLD_MAX):
        waits.append(min(wait_ms, steps.max))
        wait_ms = min(wait_ms * steps.multiplier, steps.max)
    return waits


def _merge_producer(settings: Any) -> None:
    initial_ms, max_ms, multiplier = _PRODUCER_BACKOFF_MS
    settings.backoff_policy.max_attempts = _PRODUCER_TRIES
    backoff = settings.backoff_policy.exponential_backoff
    backoff.initial.FromMilliseconds(initial_ms)
    backoff.max.FromMilliseconds(max_ms)
    backoff.multiplier = multiplier
    settings.publishing.max_body_size = BODY_BYTES_MAX
    settings.publishing.validate_message_type = True


def _merge_consumer(settings: Any, config: SubscriptionGroupConfig) -> None:
    policy = config.group_retry_policy
    settings.backoff_policy.max_attempts = config.retry_max_times + 1
    if policy is not None and policy.type == _EXPONENTIAL:
        steps = policy.exponential_retry_policy or ExponentialRetryPolicy()
        backoff = settings.backoff_policy.exponential_backoff
        backoff.initial.FromMilliseconds(steps.initial)
        backoff.max.FromMilliseconds(steps.max)
        backoff.multiplier = steps.multiplier
    else:
        customized = settings.backoff_policy.customized_backoff
        del customized.next[:]
        for wait_ms in retry_waits_ms(config):
            customized.next.add().FromMilliseconds(wait_ms)
    wanted = settings.subscription
    wanted.fifo = config.consume_message_orderly and settings.client_type not in LITE_CONSUMERS
    wanted.receive_batch_size = _BATCH_SIZE
    wanted.long_polling_timeout.FromSeconds(_POLLING_SECONDS)
    # The reference sends the limits of lite topics to all consumers.
    wanted.lite_subscription_quota = min(config.lite_quota, _INT32_MAX)
    wanted.max_lite_topic_size = LITE_TOPIC_BYTES_MAX

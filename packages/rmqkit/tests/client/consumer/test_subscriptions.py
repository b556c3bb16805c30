"""The subscriptions of a consumer to topics. Source: behaviour.md §8.3."""

from __future__ import annotations

import pytest

from rmqkit.client.consumer.context import Subscriptions
from rmqkit.client.runtime.runtime import ClientRuntime
from rmqkit.errors import SettingsError
from rmqkit.testing.clock import StandingClock


def subscriptions():
    return Subscriptions(ClientRuntime("127.0.0.1:1", clock=StandingClock(1000)), "CG")


def test_versions_rise_even_when_the_clock_does_not():
    found = subscriptions()
    found.put("T", "A || B", "TAG")
    found.put("U", "*", "TAG")
    versions = []
    for _ in range(3):
        versions.append((found["T"].sub_version, found["U"].sub_version))
        found.renew_versions({"T", "not subscribed"})
    assert versions == [(1000, 1000), (1001, 1000), (1002, 1000)]
    assert found["T"].sub_string == "A || B"
    found.put("T", "C", "TAG")
    assert (found["T"].sub_string, found["T"].sub_version) == ("C", 1004)


def test_what_is_not_legal_changes_nothing():
    found = subscriptions()
    found.put("T", "A", "TAG")
    for topic, expression in (("T", " || "), ("a b", "*")):
        with pytest.raises(SettingsError):
            found.put(topic, expression, "TAG")
    assert {topic: data.sub_string for topic, data in found.items()} == {"T": "A"}

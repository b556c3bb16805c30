"""Names and namespaces. Source: remoting.md §3.2, §8.4."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmqkit.protocol.names import SYSTEM_TOPICS, with_namespace, without_namespace

bare_names = st.text("abcXYZ019_-|", min_size=1)


@pytest.mark.parametrize(
    ("bare", "full"),
    [
        ("Orders", "NS%Orders"),
        ("%RETRY%billing", "%RETRY%NS%billing"),
        ("%DLQ%billing", "%DLQ%NS%billing"),
        ("DefaultCluster_REPLY_TOPIC", "NS%DefaultCluster_REPLY_TOPIC"),
        ("NSOrders", "NS%NSOrders"),
    ],
)
def test_a_namespace_is_part_of_the_name(bare, full):
    assert with_namespace("NS", bare) == full
    assert with_namespace("NS", full) == full
    assert without_namespace("NS", full) == bare
    assert without_namespace("NS", bare) == bare


@pytest.mark.parametrize("name", [*sorted(SYSTEM_TOPICS), "rmq_sys_wheel_timer", "CID_RMQ_SYS_TRANS", "%RETRY%", ""])
def test_names_of_the_system_are_in_no_namespace(name):
    assert with_namespace("NS", name) == name


def test_without_a_namespace_names_stay_as_they_are():
    assert (with_namespace("", "Orders"), without_namespace("", "NS%Orders")) == ("Orders", "NS%Orders")


def test_a_name_of_another_namespace_is_not_touched():
    assert without_namespace("NS", "Other%Orders") == "Other%Orders"


@given(bare_names, bare_names, st.sampled_from(["", "%RETRY%", "%DLQ%"]))
def test_a_namespace_comes_off_again(namespace, name, prefix):
    assert without_namespace(namespace, with_namespace(namespace, prefix + name)) == prefix + name

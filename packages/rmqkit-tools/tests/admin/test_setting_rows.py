"""A server's settings, joined with their entries in our tables."""

from __future__ import annotations

from rmqkit.admin.cluster.settings import compared, described
from rmqkit.settings import SECRET


def test_a_known_key_is_explained() -> None:
    (row,) = described({"flushIntervalCommitLog": "500"})
    assert (row.is_known, row.is_default, row.bounds) == (True, True, "a whole number at least 1")
    assert row.help
    assert not described({"flushIntervalCommitLog": "501"})[0].is_default


def test_a_key_that_nobody_knows_is_shown_as_it_is() -> None:
    (row,) = described({"someFutureSetting": "1"})
    assert (row.is_known, row.value, row.help, row.default) == (False, "1", "", "")


def test_settings_are_in_groups_and_unknown_keys_come_last() -> None:
    keys = ("someFutureSetting", "flushDiskType", "brokerName", "authenticationEnabled", "brokerPermission")
    rows = described(dict.fromkeys(keys, "x"))
    assert [(row.group, row.key) for row in rows] == [
        ("Broker", "brokerName"), ("Broker", "brokerPermission"), ("Store", "flushDiskType"),
        ("Users and permissions", "authenticationEnabled"), ("", "someFutureSetting"),
    ]  # fmt: skip


def test_secrets_are_covered_also_those_that_only_look_like_it() -> None:
    told = {"initAuthenticationUser": "{...}", "tls.server.keyPassword": "x", "someSecretKey": "y", "aclPassword": ""}
    values = {row.key: row.value for row in described(told)}
    assert values == dict.fromkeys(told, SECRET) | {"aclPassword": ""}


def test_servers_beside_each_other() -> None:
    rows = {row.key: row for row in compared({"a:1": {"x": "1", "y": "2"}, "b:1": {"x": "1"}})}
    assert not rows["x"].differs
    assert rows["y"].differs
    assert rows["y"].values == {"a:1": "2", "b:1": None}
    assert compared({}) == []

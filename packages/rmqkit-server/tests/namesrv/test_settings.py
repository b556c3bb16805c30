"""Settings of a ``namesrv.conf`` (behaviour.md §1.1)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rmqkit.namesrv.settings import WITHOUT_EFFECT, NamesrvSettings
from rmqkit.settings import load, parse_properties, setting_table

RMQ = Path(sys.executable).with_name("rmq")
HOT = {
    "scanNotActiveBrokerInterval",
    "orderMessageEnable",
    "returnOrderTopicConfigToBroker",
    "supportActingMaster",
    "enableAllTopicList",
    "enableTopicList",
    "notifyMinBrokerIdChanged",
    "needWaitForService",
    "waitSecondsForService",
    "deleteTopicWithBrokerRegistration",
}


def print_config(tmp_path, text):
    config = tmp_path / "namesrv.conf"
    config.write_text(text)
    # Without the setting of tests/conftest.py for brokers: a name server warns about the unknown key.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("RMQCONF_")}
    command = [RMQ, "namesrv", "-c", config, "-p"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)


def test_a_java_file_is_read():
    text = (
        "listenPort=9877\nsupportActingMaster=true\nwaitSecondsForService=10\n"
        "adminAllowedAddresses=any\nserverWorkerThreads=8\n"
    )
    loaded = load([NamesrvSettings], parse_properties(text), source="namesrv.conf", without_effect=WITHOUT_EFFECT)
    (settings,) = loaded.values
    assert (settings.listen_port, settings.support_acting_master, settings.wait_for_service_seconds) == (9877, True, 10)
    assert str(settings.admin_addresses) == "any"
    assert (loaded.unknown, loaded.without_effect) == ([], ["serverWorkerThreads"])


def test_what_may_change_while_it_runs():
    table = setting_table(NamesrvSettings)
    assert {key for key, (_, _, setting) in table.items() if setting.hot} >= HOT
    assert not any(table[key][2].hot for key in ("listenPort", "bindAddress", "kvConfigPath", "adminAllowedAddresses"))


def test_the_command_takes_the_file(tmp_path):
    done = print_config(tmp_path, "orderMessageEnable=true\nserverSelectorThreads=3\nclusterTest=false\n")
    assert done.returncode == 0
    assert {"orderMessageEnable=true", "adminAllowedAddresses=loopback", "kvConfigPath="} <= set(
        done.stdout.splitlines()
    )
    assert "without effect here: serverSelectorThreads" in done.stderr
    assert "unknown" not in done.stderr


@pytest.mark.parametrize("key", ["clusterTest", "enableControllerInNamesrv"])
def test_what_is_not_built_is_refused(tmp_path, key):
    done = print_config(tmp_path, f"{key}=true\n")
    assert done.returncode == 2
    assert done.stderr == f"rmq: {tmp_path}/namesrv.conf:1: {key}=true is not supported yet: use false\n"

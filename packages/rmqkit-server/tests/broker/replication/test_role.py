"""Role and id of a broker. Source: behaviour.md §10.2, §10.3; store.md §21.5."""

from __future__ import annotations

import logging

import pytest

from rmqkit.broker.replication.role import check_address, check_role
from rmqkit.broker.settings import BrokerRole, BrokerSettings
from rmqkit.errors import SettingsError

SYNC = BrokerRole.SYNC_MASTER


def told(caplog: pytest.LogCaptureFixture, settings: BrokerSettings) -> list[str]:
    with caplog.at_level(logging.WARNING):
        check_role(settings)
    return [record.getMessage() for record in caplog.records]


def test_a_master_has_the_id_of_masters(caplog):
    settings = BrokerSettings(broker_id=3)
    assert told(caplog, settings) == []
    assert settings.broker_id == 0


def test_a_synchronous_master_that_waits_for_nobody_is_reported(caplog):
    (line,) = told(caplog, BrokerSettings(broker_role=SYNC))
    assert "inSyncReplicas=1 waits for no slave" in line


def test_one_that_waits_for_a_slave_is_not(caplog):
    assert told(caplog, BrokerSettings(broker_role=SYNC, in_sync_replicas=2)) == []


def test_a_slave_has_an_id_of_its_own():
    with pytest.raises(SettingsError, match="brokerId=1 or higher"):
        check_role(BrokerSettings(broker_role=BrokerRole.SLAVE))


def test_clients_get_an_address_that_records_can_keep():
    with pytest.raises(SettingsError, match="brokerIP1=localhost must be an IPv4 or IPv6 address, for example "):
        check_address(BrokerSettings(broker_ip1="localhost"))
    for address in ("10.0.0.1", "::1"):
        check_address(BrokerSettings(broker_ip1=address))


def test_addresses_of_name_servers_have_ports():
    with pytest.raises(SettingsError, match="namesrvAddr=a:1;b: address 'b' must be host:port, for example"):
        check_address(BrokerSettings(broker_ip1="10.0.0.1", namesrv_addr="a:1;b"))


def test_a_slave_that_cannot_find_a_master_is_reported(caplog):
    (line,) = told(caplog, BrokerSettings(broker_role=BrokerRole.SLAVE, broker_id=1))
    assert "haMasterAddress" in line

"""Settings of metrics in a configuration file."""

from __future__ import annotations

import pytest

from rmqkit import settings as configuration
from rmqkit.broker.settings import PROMISES, BrokerSettings, refuse_unsupported
from rmqkit.errors import SettingsError
from rmqkit.metrics import EXPORTERS_WITHOUT_EFFECT, ExporterType, MetricLabels
from rmqkit.namesrv.settings import NamesrvSettings
from rmqkit.standalone import Standalone


def load(**properties):
    return configuration.load([BrokerSettings, NamesrvSettings], properties, source="broker.conf").values


@pytest.mark.parametrize(("text", "pairs"), [("", {}), ("a:1,b_2:x:y", {"a": "1", "b_2": "x:y"})])
def test_labels_are_pairs(text, pairs):
    assert MetricLabels(text).pairs == pairs


@pytest.mark.parametrize("text", ["a", "a:", ":1", "a:1,b", "a b:1", "1a:1", "ä:1"])
def test_other_labels_are_refused(text):
    with pytest.raises(ValueError, match="is not of the form name:value"):
        MetricLabels(text)


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("metricsExporterType", "OTLP_GRPC", "metricsExporterType=OTLP_GRPC must be one of DISABLE, PROM"),
        ("metricsExporterType", "LOG", "metricsExporterType=LOG must be one of DISABLE, PROM"),
        ("metricsPromExporterPort", "70000", "metricsPromExporterPort=70000 must be a whole number from 0 to 65535"),
        ("metricsLabel", "room=7", "metricsLabel=room=7: 'room=7' is not of the form name:value"),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_line(key, value, why):
    with pytest.raises(SettingsError) as refused:
        load(**{key: value})
    assert str(refused.value) == f"broker.conf: {why}"


def test_differences_are_refused_and_other_exporters_settings_are_accepted():
    with pytest.raises(SettingsError, match="metricsInDelta=true is not supported yet: use false"):
        refuse_unsupported({"metricsInDelta": "true"}, source="broker.conf", promises=PROMISES)
    refuse_unsupported({"metricsInDelta": "false"}, source="broker.conf", promises=PROMISES)
    assert "metricsGrpcExporterTarget" in EXPORTERS_WITHOUT_EFFECT


@pytest.mark.parametrize(("port", "namesrv_port"), [("7000", 7001), ("0", 0)])
def test_one_file_for_both_servers_gives_each_a_port_of_its_own(tmp_path, port, namesrv_port):
    broker, namesrv = load(metricsExporterType="PROM", metricsPromExporterPort=port, metricsLabel="a:b")
    Standalone(tmp_path, broker=broker, namesrv=namesrv)
    assert (broker.exporter_type, broker.exporter_port) == (ExporterType.PROM, int(port))
    assert (namesrv.exporter_type, namesrv.exporter_port) == (ExporterType.PROM, namesrv_port)
    assert configuration.to_properties(broker)["metricsLabel"] == "a:b"

"""``--print-config``: every setting with its source and bounds; a file that is read again on SIGHUP."""

from __future__ import annotations

import json
import os
import re

import pytest
from typer.testing import CliRunner

from rmqkit.broker.unused_settings import UnusedSettings
from rmqkit.cli.servers import serve
from rmqkit.cli.servers.sources import BROKER, Sources, options_of
from rmqkit.errors import SettingsError
from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.command import Command
from rmqkit.settings import parse_properties, setting_table
from tests.interop.apache import ask
from tests.interop.server_process import wait_until
from tests.interop.standalone import run_standalone

KEYS = {key for one in BROKER for key in setting_table(one) if one is not UnusedSettings}


def printed(*arguments, **env):
    command = [*map(str, arguments), "--print-config"]
    done = CliRunner().invoke(serve.app, command, env={"NAMESRV_ADDR": None, **env}, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_every_setting_is_printed_with_where_it_comes_from(tmp_path):
    config = tmp_path / "broker.conf"
    config.write_text(
        "# first\nbrokerName = broker-a\nfileReservedTime=48\nbrokerIP1=10.0.0.1\ntls.server.keyPassword=x\n"
        "highSpeedMode=true\n"
    )
    rows = json.loads(
        printed(
            *("broker", "-c", config, "--json", "--port", 0, "--set", "maxMessageSize=9"),
            NAMESRV_ADDR="n:9876",
            RMQCONF_brokerIP1="10.0.0.2",
        )
    )
    assert {row["key"] for row in rows} == KEYS | {"highSpeedMode"}  # without effect, and given
    by_key = {row["key"]: (row["value"], row["source"]) for row in rows}
    assert by_key["brokerName"] == ("broker-a", f"{config}:2")
    assert by_key["fileReservedTime"] == ("48", f"{config}:3")
    assert by_key["brokerIP1"] == ("10.0.0.2", "environment RMQCONF_brokerIP1")
    assert by_key["namesrvAddr"] == ("n:9876", "environment NAMESRV_ADDR")
    assert by_key["maxMessageSize"] == ("9", "command line")
    assert by_key["listenPort"] == ("0", "command line")
    assert by_key["flushDiskType"] == ("ASYNC_FLUSH", "default")
    assert by_key["tls.server.keyPassword"] == ("***", f"{config}:5")
    row = next(row for row in rows if row["key"] == "listenPort")
    assert (row["default"], row["bounds"], row["hot"]) == ("10911", "a whole number from 0 to 65535", False)


@pytest.mark.parametrize("server", ["broker", "namesrv", "standalone"])
def test_what_is_printed_may_be_a_configuration_file(tmp_path, server):
    config = tmp_path / "x.conf"
    config.write_text("tls.server.keyPassword=s\ntls.server.certPath=\\ C:\\\\cert\n")
    text = printed(server, "-c", config)
    line = rf"^# {config}:2 +text +restart  certificate chain, PEM\ntls\.server\.certPath=\\ C:"
    assert re.search(line, text, re.MULTILINE)
    assert "# tls.server.keyPassword is set and not shown" in text
    columns = {line.index("  ", 2) for line in text.splitlines() if line.startswith("# default ")}
    assert len(columns) == 1
    properties = parse_properties(text)
    assert properties["tls.server.certPath"] == " C:\\cert"
    assert list(properties) == sorted(properties)
    again = tmp_path / "again.conf"
    again.write_text(text)
    assert parse_properties(printed(server, "-c", again)) == {"tls.server.keyPassword": "", **properties}


def test_nothing_is_started_and_no_file_made(tmp_path):
    printed("standalone", "--store", tmp_path / "store", "--log-file", tmp_path / "log")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("option", "line"),
    [
        ("brokerNmae=x", "--set brokerNmae=x: unknown key, did you mean brokerName?"),
        ("brokerName", "--set brokerName must be KEY=VALUE, as in broker.conf"),
        ("listenPort=x", "command line: listenPort=x must be a whole number from 0 to 65535"),
        ("logLevel=A=LOUD", "command line: logLevel=A=LOUD: A=LOUD is neither one of DEBUG, INFO, WARNING, ERROR, "),
    ],
)
def test_an_option_that_cannot_be_used(option, line):
    with pytest.raises(SettingsError) as caught:
        Sources(BROKER, None, options_of([option])).read()
    assert str(caught.value).startswith(line)


def test_a_changed_file_is_read_again(tmp_path):
    config = tmp_path / "broker.conf"
    config.write_text("maxMessageSize=100\nfileReservedTime=48\nbrokerName=a\n")
    with run_standalone(tmp_path / "store", tmp_path, "-c", str(config)) as running:
        log = running.process.log

        def told(text, line):
            config.write_text(text)
            os.kill(running.process.pid, 1)
            wait_until(lambda: line in log.read_text(), 100, f"{line!r} in {log.read_text()}")

        told(
            "maxMessageSize=x\n",
            f"the settings were not changed: {config}:1: maxMessageSize=x must be a whole number",
        )
        told(
            "maxMessageSize=200\nbrokerName=b\nlistenPort=99\nlongPolingEnable=true",
            f"{config} was read again; changed: fileReservedTime, maxMessageSize; waiting for a restart: brokerName\n",
        )
        told("maxMessageSize=200\nbrokerName=a\n", f"{config} was read again; changed: nothing\n")
        assert "unknown key longPolingEnable is ignored, did you mean longPollingEnable?" in log.read_text()
        running.stop()


def test_what_a_request_changed_is_there_after_a_restart(tmp_path):
    for wanted in ("4194304", "77"):
        with run_standalone(tmp_path / "store", tmp_path, "--verbose") as running:
            shown = ask(running.broker_addr, Command(RequestCode.GET_BROKER_CONFIG)).body.decode()
            assert parse_properties(shown)["maxMessageSize"] == wanted
            update = Command(RequestCode.UPDATE_BROKER_CONFIG, body=b"maxMessageSize=77\nlogLevel=ERROR")
            assert ask(running.broker_addr, update).code == 0
            update = Command(RequestCode.UPDATE_NAMESRV_CONFIG, body=b"waitSecondsForService=3")
            assert ask(running.namesrv_addr, update).code == 0
            running.stop()
    kept = (tmp_path / "store/config/broker.conf").read_text()
    assert kept == "maxMessageSize=77\nlogLevel=ERROR\nwaitSecondsForService=3\n"


def test_standalone_lets_messages_be_called_back_unless_configured_otherwise(tmp_path):
    def recalls(*arguments):
        rows = json.loads(printed(*arguments, "--json", "--set", f"storePathRootDir={tmp_path}"))
        return next((row["value"], row["source"]) for row in rows if row["key"] == "recallMessageEnable")

    config = tmp_path / "broker.conf"
    config.write_text("recallMessageEnable=false\n")
    assert recalls("standalone") == ("true", "rmq standalone")
    assert recalls("standalone", "-c", config) == ("false", f"{config}:1")
    assert recalls("broker") == ("false", "default")

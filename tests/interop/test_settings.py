"""Our broker knows every setting that a real Apache broker shows, with Apache's default if the setting has no
effect.
"""

from __future__ import annotations

import asyncio
import re
import subprocess
from pathlib import Path

from rmqkit.broker.settings import BrokerSettings
from rmqkit.broker.unused_settings import UNUSED, UnusedSettings
from rmqkit.cli.servers.sources import BROKER
from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.command import Command, request
from rmqkit.proxy.remote.users import ProxyUserSettings
from rmqkit.proxy.server.server import ProxySettings
from rmqkit.proxy.server.unused_settings import RENAMED
from rmqkit.proxy.server.unused_settings import UNUSED as UNUSED_AT_PROXY
from rmqkit.remoting.client import RemotingClient
from rmqkit.settings import parse_properties, setting_table, to_properties
from rmqkit.standalone import Standalone
from tests.interop.apache import BROKER_CONF, ApachePair, ask
from tests.interop.conftest import ACCESS_CONF, kit_or_skip
from tests.interop.grpc.apache_proxy import prepare_proxy
from tests.interop.kit import default_version

OURS_ALONE = """
    adminAllowedAddresses haMasterAddress indexTagsEnable logFile logFileBytesMax logFileCount logFormat logLevel
    proxyProtocolEnable readOnlyCommitLogStorePaths
""".split()
# Settings that Apache's broker has but does not show.
NOT_SHOWN_BY_APACHE = """
    authenticationEnabled authenticationWhitelist authorizationEnabled authorizationWhitelist initAuthenticationUser
    innerClientAuthenticationCredentials
    tls.client.authServer tls.client.certPath tls.client.keyPassword tls.client.keyPath tls.client.trustCertPath
    tls.enable tls.server.certPath tls.server.keyPassword tls.server.keyPath tls.server.mode
    tls.server.need.client.auth tls.server.trustCertPath
""".split()
# Settings since 5.5.1, of which the tests have no broker.
NEWER = """
    batchDeleteSubscriptionGroupMaxRate batchDeleteTopicMaxRate correctMinOffsetMadviseEnable
    liteEventCapacityCacheTtlMs maxCheckMessageReuseBufferSize metricsExportBatchMaxConcurrent
    metricsExportBatchSplitEnabled metricsExportOtelMemoryMode popOrderLockTimerTickMs popOrderLockTimerTicksPerWheel
    popRocksdbBlockCacheSize popRocksdbWriteBufferSize rocksdbCQSelectiveDoubleWriteEnable
    rocksdbMaxSizeAmplificationPercent
""".split()
# Settings that Apache derives from the machine, or from its start; the last is computed from other settings.
OF_THE_MACHINE = """
    endTransactionThreadPoolNums heartbeatThreadPoolNums litePullMessageThreadPoolNums processReplyMessageThreadPoolNums
    pullMessageThreadPoolNums putMessageFutureThreadPoolNums queryMessageThreadPoolNums sendMessageThreadPoolNums
    clientCallbackExecutorThreads rocketmqHome connectTimeoutMillis bitMapLengthConsumeQueueExt
""".split()


def shown_by(apache: ApachePair) -> dict[str, str]:
    """Return the settings that Apache's broker shows, without those that its file adds."""
    answer = ask(apache.broker_addr, Command(RequestCode.GET_BROKER_CONFIG))
    shown = parse_properties(bytes(answer.payload).decode())
    return {key: text for key, text in shown.items() if key not in ACCESS_CONF}


def test_every_setting_of_apache_s_broker_is_known_and_ours_are_not_its(apache: ApachePair) -> None:
    theirs = shown_by(apache)
    known = {key for one in BROKER for key in setting_table(one)}
    assert len(theirs) > 400
    assert theirs.keys() - known == set(), "our broker knows every setting of Apache's broker"
    assert {*OURS_ALONE, *NOT_SHOWN_BY_APACHE} <= known - theirs.keys()


def test_no_setting_is_both_with_and_without_effect() -> None:
    without = [key for group in UNUSED for key in group.defaults]
    assert len(without) == len(set(without)), "each setting is in one group"
    effective = {key for one in BROKER if one is not UnusedSettings for key in setting_table(one)}
    assert effective.isdisjoint(without)


def test_every_setting_of_apache_s_proxy_is_known_once() -> None:
    kit = kit_or_skip(default_version(), prepare_proxy)
    (jar,) = kit.lib.glob("rocketmq-proxy-*.jar")
    javap = [Path(kit.java).with_name("javap"), "-p", "-cp", jar, "org.apache.rocketmq.proxy.config.ProxyConfig"]
    shown = subprocess.run(javap, capture_output=True, text=True, check=True).stdout
    fields = re.findall(r"^  private (?!static)[\w.<>, ]+ (\w+);$", shown, re.MULTILINE)
    theirs = {*fields} - {"configName"}
    effective = {key for one in (ProxySettings, ProxyUserSettings) for key in setting_table(one)}
    without = [key for group in UNUSED_AT_PROXY for key in group.defaults]
    assert len(theirs) > 140
    assert theirs - effective - RENAMED.keys() - {*without} == set(), "our proxy knows every setting of Apache's proxy"
    assert len(without) == len({*without}), "each setting is in one group"
    assert effective.isdisjoint(without)


def test_what_has_no_effect_is_shown_with_apache_s_default(apache: ApachePair) -> None:
    theirs, ours = shown_by(apache), to_properties(UnusedSettings())
    compared = ours.keys() - {*OF_THE_MACHINE, *BROKER_CONF, *NEWER}
    assert len(compared) > 280
    assert {key: (theirs[key], ours[key]) for key in compared if theirs[key] != ours[key]} == {}


def test_our_broker_accepts_every_setting_as_apache_s_shows_it(apache: ApachePair, tmp_path: Path) -> None:
    """All settings without effect in one request. Settings that must not change have Apache's default."""
    theirs = shown_by(apache)
    changed = to_properties(UnusedSettings()).keys() - {"rocketmqHome", *NEWER}
    text = "".join(f"{key}={theirs[key]}\n" for key in changed)

    async def main() -> tuple[int, str | None, dict[str, str]]:
        settings = BrokerSettings(listen_port=0, bind_address="127.0.0.1")
        client = RemotingClient()
        async with Standalone(tmp_path, broker=settings) as ours:
            update = Command(RequestCode.UPDATE_BROKER_CONFIG, body=text.encode())
            changed = await client.call(ours.broker_address, update, 60_000)
            shown = await client.call(ours.broker_address, request(RequestCode.GET_BROKER_CONFIG), 60_000)
        await client.close()
        return changed.code, changed.remark, parse_properties(bytes(shown.payload).decode())

    code, remark, shown = asyncio.run(main())
    assert code == 0, remark
    assert theirs.keys() <= shown.keys()

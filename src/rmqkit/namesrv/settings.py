"""Settings of the name server (``namesrv.conf``). Source: behaviour.md §1.1.

UPDATE_NAMESRV_CONFIG may change the ones marked hot; a change is kept in the file.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import field

from rmqkit.metrics import EXPORTER_PROMISES, EXPORTERS_WITHOUT_EFFECT
from rmqkit.remoting.address import AdminAddresses
from rmqkit.remoting.limits import ConnectionSettings
from rmqkit.settings import Setting


class NamesrvSettings(ConnectionSettings, kw_only=True):
    """What a ``namesrv.conf`` may say."""

    listen_port: Annotated[int, Setting("listenPort", "port to listen on, 0 for a free one", low=0, high=65535)] = 9876
    bind_address: Annotated[str, Setting("bindAddress", "address to listen on")] = "0.0.0.0"
    kv_config_path: Annotated[str, Setting("kvConfigPath", "KV file; default: ~/namesrv/kvConfig.json")] = ""
    admin_addresses: Annotated[
        AdminAddresses,
        Setting("adminAllowedAddresses", "who may change the server: loopback, any, or addresses and networks"),
    ] = field(default_factory=AdminAddresses)
    proxy_addresses: Annotated[
        AdminAddresses,
        Setting(
            "proxyProtocolAddresses",
            "balancers whose PROXY preamble is believed: none, loopback, any, or addresses and networks",
            hot=True,
        ),
    ] = field(default_factory=lambda: AdminAddresses("none"))
    registration_addresses: Annotated[
        AdminAddresses,
        Setting(
            "registrationAllowedAddresses",
            "who may speak for brokers: none, loopback, any, or addresses and networks",
            hot=True,
        ),
    ] = field(default_factory=lambda: AdminAddresses("any"))
    allow_takeover: Annotated[
        bool,
        Setting("allowBrokerTakeover", "let a broker have the place of one that is alive, as DLedger needs", hot=True),
    ] = False
    scan_interval_ms: Annotated[
        int, Setting("scanNotActiveBrokerInterval", "ms between two looks for silent brokers", low=100, hot=True)
    ] = 5000
    unregister_queue_capacity: Annotated[
        int, Setting("unRegisterBrokerQueueCapacity", "brokers that may wait to be forgotten", low=1)
    ] = 3000
    order_message_enable: Annotated[
        bool, Setting("orderMessageEnable", "tell clients the order configuration of a topic", hot=True)
    ] = False
    return_order_topic_config: Annotated[
        bool, Setting("returnOrderTopicConfigToBroker", "tell brokers all order topics when they register", hot=True)
    ] = True
    support_acting_master: Annotated[
        bool, Setting("supportActingMaster", "show the lowest slave of a masterless group as its master", hot=True)
    ] = False
    all_topic_list_enable: Annotated[bool, Setting("enableAllTopicList", "answer lists of all topics", hot=True)] = True
    topic_list_enable: Annotated[bool, Setting("enableTopicList", "list topics of clusters and units", hot=True)] = True
    notify_min_broker_id_changed: Annotated[
        bool, Setting("notifyMinBrokerIdChanged", "tell brokers of a group when its lowest id changes", hot=True)
    ] = False
    need_wait_for_service: Annotated[
        bool, Setting("needWaitForService", "answer no routes until waitSecondsForService have passed", hot=True)
    ] = False
    wait_for_service_seconds: Annotated[
        int, Setting("waitSecondsForService", "seconds after the start without routes", low=0, hot=True)
    ] = 45
    delete_topic_with_registration: Annotated[
        bool, Setting("deleteTopicWithBrokerRegistration", "forget topics that a broker no longer registers", hot=True)
    ] = False
    config_black_list: Annotated[
        str, Setting("configBlackList", "keys that must not be changed, separated by semicolons")
    ] = "configBlackList;configStorePath;kvConfigPath"


# Keys of Java's configuration about threads, buffers and the JVM: accepted, with one note, and without effect.
WITHOUT_EFFECT = EXPORTERS_WITHOUT_EFFECT | frozenset(
    """
    rocketmqHome configStorePath productEnvName defaultThreadPoolNums clientRequestThreadPoolNums
    defaultThreadPoolQueueCapacity clientRequestThreadPoolQueueCapacity serverWorkerThreads
    serverCallbackExecutorThreads serverSelectorThreads serverAsyncSemaphoreValue serverOnewaySemaphoreValue
    serverSocketSndBufSize serverSocketRcvBufSize serverPooledByteBufAllocatorEnable useEpollNativeSelector
    """.split()
)

# Keys that promise something, and the values whose promise is kept.
PROMISES = EXPORTER_PROMISES | {"clusterTest": ("false",), "enableControllerInNamesrv": ("false",)}

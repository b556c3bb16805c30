"""Settings of the name server (``namesrv.conf``). Source: behaviour.md §1.1.

UPDATE_NAMESRV_CONFIG can change the settings marked ``hot``. A change is stored in the file.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import field

from rmqkit.metrics import EXPORTER_PROMISES, EXPORTERS_WITHOUT_EFFECT
from rmqkit.remoting.address import AdminAddresses
from rmqkit.remoting.limits import ConnectionSettings
from rmqkit.settings import Setting


class NamesrvSettings(ConnectionSettings, kw_only=True):
    """The settings of a name server in ``namesrv.conf``."""

    listen_port: Annotated[int, Setting("listenPort", "port to listen on; 0 means a free port", low=0, high=65535)] = (
        9876
    )
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
            "load balancers whose PROXY protocol header is trusted: none, loopback, any, or addresses and networks",
            hot=True,
        ),
    ] = field(default_factory=lambda: AdminAddresses("none"))
    registration_addresses: Annotated[
        AdminAddresses,
        Setting(
            "registrationAllowedAddresses",
            "addresses from which brokers may register: none, loopback, any, or addresses and networks",
            hot=True,
        ),
    ] = field(default_factory=lambda: AdminAddresses("any"))
    allow_takeover: Annotated[
        bool,
        Setting("allowBrokerTakeover", "let a broker replace one that is still alive, as DLedger needs", hot=True),
    ] = False
    scan_interval_ms: Annotated[
        int,
        Setting("scanNotActiveBrokerInterval", "interval of checking for inactive brokers, in ms", low=100, hot=True),
    ] = 5000
    unregister_queue_capacity: Annotated[
        int, Setting("unRegisterBrokerQueueCapacity", "maximum number of brokers that wait for removal", low=1)
    ] = 3000
    order_message_enable: Annotated[
        bool, Setting("orderMessageEnable", "send clients the order configuration of a topic", hot=True)
    ] = False
    return_order_topic_config: Annotated[
        bool, Setting("returnOrderTopicConfigToBroker", "send brokers all ordered topics when they register", hot=True)
    ] = True
    support_acting_master: Annotated[
        bool,
        Setting(
            "supportActingMaster", "if a master is down, report its slave with the lowest id as acting master", hot=True
        ),
    ] = False
    all_topic_list_enable: Annotated[
        bool, Setting("enableAllTopicList", "answer requests for the list of all topics", hot=True)
    ] = True
    topic_list_enable: Annotated[
        bool, Setting("enableTopicList", "answer requests for the topics of clusters and units", hot=True)
    ] = True
    notify_min_broker_id_changed: Annotated[
        bool,
        Setting("notifyMinBrokerIdChanged", "notify brokers with the same name when their lowest id changes", hot=True),
    ] = False
    need_wait_for_service: Annotated[
        bool, Setting("needWaitForService", "after the start, answer no routes for waitSecondsForService", hot=True)
    ] = False
    wait_for_service_seconds: Annotated[
        int, Setting("waitSecondsForService", "seconds after the start, for needWaitForService", low=0, hot=True)
    ] = 45
    delete_topic_with_registration: Annotated[
        bool, Setting("deleteTopicWithBrokerRegistration", "remove topics that a broker no longer registers", hot=True)
    ] = False
    config_black_list: Annotated[
        str, Setting("configBlackList", "settings that requests cannot change, separated by semicolons")
    ] = "configBlackList;configStorePath;kvConfigPath"


# Keys of Java's configuration for threads, buffers and the JVM: accepted without effect, and logged in one line.
WITHOUT_EFFECT = EXPORTERS_WITHOUT_EFFECT | frozenset(
    """
    rocketmqHome configStorePath productEnvName defaultThreadPoolNums clientRequestThreadPoolNums
    defaultThreadPoolQueueCapacity clientRequestThreadPoolQueueCapacity serverWorkerThreads
    serverCallbackExecutorThreads serverSelectorThreads serverAsyncSemaphoreValue serverOnewaySemaphoreValue
    serverSocketSndBufSize serverSocketRcvBufSize serverPooledByteBufAllocatorEnable useEpollNativeSelector
    """.split()
)

# Keys for features that are missing here, and the values that are accepted for them.
PROMISES = EXPORTER_PROMISES | {"clusterTest": ("false",), "enableControllerInNamesrv": ("false",)}

"""The role of a broker in replication: it sends its log to slaves, or it follows its master.

====================================  ===============================================================================
a master                              accepts slaves and sends them all data that becomes readable
a slave                               copies its master's log and tables, and serves reads while both logs are equal
a broker with                         acts for a missing master, and contacts the other brokers before it registers
``enableSlaveActingMaster``
====================================  ===============================================================================

Brokers of one name, name servers and operators send these requests (``AdminBrokerProcessor``):

====  ===========================  ===================================================================================
code  request                      answer
====  ===========================  ===================================================================================
905   the lowest id changed        empty. The broker looks up its group and does not rely on the notice
906   empty                        a master returns the address at which slaves read its log. A slave returns nothing
906   with a master's addresses    a slave that may act for the master stops acting and follows it, if name servers
                                   returned the same addresses last. Otherwise it requests them from the name servers
907   replication progress         the progress of all slaves at a master, of the slave itself at a slave
                                   (``mqadmin haStatus``)
908   the log length to retain     a slave refuses, because it never drops data. A master does nothing, like the
                                   reference
====  ===========================  ===================================================================================

Brokers receive 908 when a slave with ``syncMasterFlushOffsetWhenStartup`` starts.
Source: store.md §21; behaviour.md §1.8, §10, §10.5; remoting.md §4.4, §6.4.13.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import msgspec

from rmqkit.broker.handlers import Handlers, answers
from rmqkit.broker.registration import Registration
from rmqkit.broker.replication.acting_master import MASTER_ID, ActingMaster, PreOnline, ReplicationContext
from rmqkit.broker.replication.copies import waits_for_copies
from rmqkit.broker.replication.escape import EscapeBridge
from rmqkit.broker.replication.lite_offsets import LiteOffsetCopies
from rmqkit.broker.replication.slave import HaSlave
from rmqkit.broker.replication.tables import SlaveSync
from rmqkit.broker.settings import BrokerRole, BrokerSettings
from rmqkit.errors import SettingsError
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import Command, decode_header_leniently, reply
from rmqkit.protocol.record import pack_host
from rmqkit.protocol.schemas.brokers import HaInfo, HaRuntimeInfo
from rmqkit.remoting.address import advertised_ip, ip_of, split_address, split_addresses
from rmqkit.remoting.client import RemotingClient
from rmqkit.remoting.connection import Connection
from rmqkit.remoting.tls import ClientTls, ServerTls, TlsMode

_DOUBTED_MAX = 256

_log = logging.getLogger(__name__)


def check_address(settings: BrokerSettings) -> None:
    """Check the addresses in the settings. Raises SettingsError: the address for clients is not an IP address, which
    records require, or the address of a name server is invalid."""
    try:
        pack_host(settings.broker_ip1, 0)
    except ValueError:
        raise SettingsError(
            f"brokerIP1={settings.broker_ip1} must be an IPv4 or IPv6 address, for example {advertised_ip('')}"
        ) from None
    if settings.namesrv_addr:
        try:
            split_addresses(settings.namesrv_addr)
        except ValueError as error:
            raise SettingsError(f"namesrvAddr={settings.namesrv_addr}: {error}") from None


def check_role(settings: BrokerSettings) -> None:
    """Set the id of a master, and warn if a SYNC_MASTER waits for no slave or a slave cannot find its master.
    Raises SettingsError: a slave has the id of a master."""
    if settings.broker_role is BrokerRole.SLAVE:
        if settings.broker_id == MASTER_ID:
            raise SettingsError("brokerRole=SLAVE with brokerId=0, which is the master's: give it brokerId=1 or higher")
        if not (settings.namesrv_addr or settings.ha_master_address):
            _log.warning("this slave cannot find its master: set namesrvAddr or haMasterAddress")
        return
    # Set 0 even if the file has another id: clients send only to the master, which is the broker with id 0.
    settings.broker_id = MASTER_ID
    if settings.broker_role is BrokerRole.SYNC_MASTER and not waits_for_copies(settings):
        _log.warning("brokerRole=SYNC_MASTER with inSyncReplicas=1 waits for no slave: set inSyncReplicas=2")


def warn_of_ha_port(settings: BrokerSettings, tls: ServerTls | None, *, has_users: bool) -> None:
    """Warn at a master's start that users and TLS of the main port do not protect the HA port."""
    if settings.ha_tls and tls is not None and tls.asks_for_certificates:
        return
    if has_users:
        _log.warning(
            "authenticationEnabled does not protect the HA port, which has no users: haAllowedAddresses=%s can read "
            "the whole log%s; to check slaves, set haTlsEnable=true and tls.server.need.client.auth=require",
            *(settings.ha_addresses, "" if settings.ha_tls else " in plain"),
        )
    elif tls is not None and tls.mode is TlsMode.ENFORCING and not settings.ha_tls:
        _log.warning(
            "tls.server.mode=enforcing does not protect the HA port: haAllowedAddresses=%s get the log in plain; set "
            "haTlsEnable=true if no slave is Apache's",
            settings.ha_addresses,
        )


class SlaveRole:
    """The work of a slave. `follow` starts it.

    Attributes:
        acting: the part that acts for a missing master; None unless configured.
        is_registered: True after the master's address was requested from the name servers.
    """

    def __init__(
        self,
        context: ReplicationContext,
        client: RemotingClient,
        store_root: Path,
        *,
        flushes: bool,
        tls: ClientTls | None = None,
    ) -> None:
        self.tables = SlaveSync(
            context.topics,
            context.groups,
            context.offsets,
            context.schedule,
            client,
            store_root,
            context.timer,
            context.clock,
            None if context.lite is None else LiteOffsetCopies(context.lite.offsets, context.store),
        )
        self.log = HaSlave(
            context.store,
            context.settings,
            context.clock,
            client,
            address=context.address,
            flushes=flushes,
            prepare=self.tables.copy_topics,
            tls=tls,
        )
        self.acting: ActingMaster | None = None
        self.is_registered = False
        self._context = context
        self._client = client
        self._master_hosts: set[str] = set()

    @property
    def may_serve(self) -> bool:
        """Return True if messages can be served: the log was compared with the master's log, or there is no master."""
        return self.is_registered and self.log.may_serve

    def follow(self, master: str | None, ha_address: str | None) -> None:
        """Copy the tables of the master at an address, and its log from its HA port. None: the master is gone. The
        slave stops copying tables, and still tries to reconnect to the HA port."""
        # Remember the hosts while there is no master: a returning master is trusted at its last address.
        if master is not None:
            self._master_hosts = {_host_of(each) for each in (master, ha_address) if each}
        self.tables.follow(master)
        if ha_address or self._context.settings.ha_master_address:
            self.log.follow(ha_address or "", master)

    def believes(self, connection: Connection, announced: HaInfo) -> bool:
        """Return True if an announced master is trusted. The name servers or the settings must have had its addresses
        last, and the request must come from one of these addresses or from this machine."""
        known = self._master_hosts | {_host_of(each) for each in (self._context.settings.ha_master_address,) if each}
        hosts = {_host_of(each) for each in (announced.master_address, announced.master_ha_address) if each}
        # Check only the last hop, which is the peer of the socket: a client can write other hops into a preamble.
        hop = connection.hops[-1] if connection.hops else None
        if hop is None:
            return False
        return hosts <= known and (hop.is_loopback or str(hop) in known)

    def may_act(self, registration: Registration) -> None:
        """Let the slave act for a missing master, if it is configured to."""
        assert self.acting is None, "a slave has one acting master"
        settings = self._context.settings
        if settings.acts_as_master:
            escape = EscapeBridge(settings, registration, self._client, self._context.clock)
            self.acting = ActingMaster(
                self._context,
                registration,
                self._client,
                remote_put=escape.put if settings.remote_escape else None,
                holds_back=lambda: self.log.is_following or self.log.is_diverged,
                on_master=self.follow,
            )

    def status(self) -> HaRuntimeInfo:
        """Return the answer to GET_BROKER_HA_STATUS."""
        return HaRuntimeInfo(master=False, ha_client_runtime_info=self.log.status())

    async def close(self) -> None:
        await self.tables.close()
        await self.log.close()


def _host_of(address: str) -> str:
    """Return the host of ``host:port``. An IP address has the form that sockets use. Return a text that is not an
    address unchanged."""
    try:
        host, _ = split_address(address)
    except ValueError:
        return address
    return str(ip_of(host) or host)


async def sync_with_group(
    context: ReplicationContext, registration: Registration, client: RemotingClient, ha_address: str
) -> None:
    """Adopt the progress of the other brokers of this name before this broker registers, if it is configured to."""
    if context.settings.acts_as_master and not context.settings.skip_pre_online:
        await PreOnline(context, registration, client, ha_address=ha_address).run()


class ReplicationHandlers(Handlers[ReplicationContext]):
    """The handlers of the requests 905 to 908. ``ha_address``: the address at which slaves read this broker's log.
    ``slave``: None at a master. ``status``: returns the answer to 907."""

    def __init__(
        self,
        context: ReplicationContext,
        *,
        ha_address: str,
        slave: SlaveRole | None,
        status: Callable[[], HaRuntimeInfo],
    ) -> None:
        super().__init__(context)
        self._ha_address = ha_address
        self._slave = slave
        self._status = status
        self._doubted: set[str] = set()

    @answers(RequestCode.GET_BROKER_HA_STATUS)
    def ha_status(self, connection: Connection, command: Command) -> Command:
        return reply(command, body=msgspec.json.encode(self._status()))

    @answers(RequestCode.RESET_MASTER_FLUSH_OFFSET, admins_only=True)
    def reset_flush_offset(self, connection: Connection, command: Command) -> Command:
        if self._slave is None:
            return reply(command)
        remark = f" request type {command.code} not supported: a slave of rmqkit drops nothing of its log at a start"
        return reply(command, ResponseCode.REQUEST_CODE_NOT_SUPPORTED, remark)

    @answers(RequestCode.NOTIFY_MIN_BROKER_ID_CHANGE)
    def lowest_id_changed(self, connection: Connection, command: Command) -> Command:
        if self._slave is not None and self._slave.acting is not None:
            # Do not trust the notice itself: any client can send a notice, and an old notice may arrive late.
            self._slave.acting.look_soon()
        return reply(command)

    @answers(RequestCode.EXCHANGE_BROKER_HA_INFO)
    async def ha_info(self, connection: Connection, command: Command) -> Command:
        """Return the address of this master's log. A slave follows the master that announces itself."""
        master = decode_header_leniently(command, HaInfo)
        if self._slave is None:
            is_asked = master.master_ha_address is None
            return reply(command, header=HaInfo(self._ha_address, 0, self._context.address) if is_asked else HaInfo())
        acting = self._slave.acting
        if master.master_address and master.master_ha_address and acting is not None:
            if not self._slave.believes(connection, master):
                self._doubt(connection, master)
                acting.look_soon()
                return reply(command)
            # First stop acting, then follow. The master requests the offsets after this answer. If they moved later,
            # the master would deliver messages again.
            await acting.give_way()
            self._slave.follow(master.master_address, master.master_ha_address)
        return reply(command)

    def _doubt(self, connection: Connection, master: HaInfo) -> None:
        """Log a warning about a peer that is not trusted, once for each host."""
        host = connection.addresses[0] if connection.addresses else "?"
        if host not in self._doubted and len(self._doubted) < _DOUBTED_MAX:
            self._doubted.add(host)
            _log.warning(
                "%s reports that the master is %s with its log at %s: ignored until the name servers report it",
                *(connection.peer, master.master_address, master.master_ha_address),
            )

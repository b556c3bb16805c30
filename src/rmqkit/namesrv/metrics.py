"""What a name server tells Prometheus: how fast it answers, how much its tables hold. Apache's tells nothing; ours
has the settings of a broker. Loop only. Source: behaviour.md §9.10.
"""

from __future__ import annotations

from functools import partial

from rmqkit.clock import Clock
from rmqkit.metrics.values import Gathered, histogram
from rmqkit.namesrv.routes import RouteTable
from rmqkit.namesrv.settings import NamesrvSettings
from rmqkit.remoting.exporter import Exporter
from rmqkit.remoting.metering import Meter, MeteredConnection, lane_values
from rmqkit.remoting.router import Router
from rmqkit.remoting.server import RemotingServer


class NameServerMetrics:
    """A name server's values and the port that they are read from.
    ``connection``: makes connections that count. ``address``: of the port; set by `bind`."""

    def __init__(self, settings: NamesrvSettings, routes: RouteTable, dispatch: Router, clock: Clock) -> None:
        self._settings = settings
        self._routes = routes
        self._dispatch = dispatch
        self._clock = clock
        self._meter = Meter()
        self._lag_ms = histogram("rmqkit_event_loop_lag")
        self._servers: list[RemotingServer] = []
        self._exporter = Exporter()
        self.connection = partial(MeteredConnection, meter=self._meter)

    @property
    def address(self) -> str:
        return self._exporter.address

    async def bind(self) -> None:
        """Take the port. Raises ListenFailed: it is taken, or the address is not this machine's."""
        settings = self._settings
        await self._exporter.bind(settings.exporter_host or settings.bind_address, settings.exporter_port)

    async def serve(self, server: RemotingServer, node_id: str) -> None:
        self._servers.append(server)
        common = {**self._settings.metric_labels.pairs, "node_type": "nameserver", "node_id": node_id}
        await self._exporter.serve(self.gather, common, self._lag_ms, self._clock)

    async def close(self) -> None:
        await self._exporter.close()

    async def gather(self) -> Gathered:
        """All values of the moment."""
        clusters = self._routes.clusters()
        brokers = clusters.broker_addr_table.values()
        lanes = {lane.name: (lane.requests, lane.requests_max) for lane in self._dispatch.lanes}
        return {
            "rocketmq_rpc_latency": self._meter.gather(),
            "rmqkit_event_loop_lag": {(): self._lag_ms},
            "rmqkit_namesrv_clusters": {(): len(clusters.cluster_addr_table)},
            "rmqkit_namesrv_brokers": {(): sum(len(broker.broker_addrs) for broker in brokers)},
            "rmqkit_namesrv_topics": {(): len(self._routes.topics())},
            **lane_values(lanes, self._servers),
        }

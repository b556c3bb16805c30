"""The metrics of a proxy, and the port for Prometheus (``ProxyMetricsManager``).

Apache's proxy reports only that it is up. Source: grpc.md §11; behaviour.md §9.10.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rmqkit.clock import Clock
from rmqkit.exporter import Exporter, lane_values
from rmqkit.metrics import ExporterSettings, Gathered, histogram
from rmqkit.proxy.service.endpoint import Endpoint
from rmqkit.remoting.server import RemotingServer

__all__ = ["ProxyMetrics"]


class ProxyMetrics:
    """The metrics of a proxy. Answers are counted after `serve`. ``address``: address of the port, set by `bind`."""

    def __init__(self, settings: ExporterSettings, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self._lag_ms = histogram("rmqkit_event_loop_lag")
        self._exporter = Exporter()
        self._endpoint: Endpoint
        self._servers: Sequence[RemotingServer]

    @property
    def address(self) -> str:
        return self._exporter.address

    async def bind(self, host: str) -> None:
        """Bind the port. Raises ListenFailed: the port is in use, or the address is not local."""
        await self._exporter.bind(self._settings.exporter_host or host, self._settings.exporter_port)

    async def serve(self, endpoint: Endpoint, servers: Sequence[RemotingServer], node_id: str) -> None:
        self._endpoint, self._servers = endpoint, servers
        endpoint.answered = Counter()
        common = {**self._settings.metric_labels.pairs, "node_type": "proxy", "node_id": node_id}
        await self._exporter.serve(self.gather, common, self._lag_ms, self._clock)

    async def close(self) -> None:
        await self._exporter.close()

    async def gather(self) -> Gathered:
        """Return the current values."""
        endpoint = self._endpoint
        assert endpoint.answered is not None, "`serve` has set the counter of answers"
        clients = list(endpoint.clients)
        return {
            "rocketmq_proxy_up": {("cluster",): 1},
            "rmqkit_event_loop_lag": {(): self._lag_ms},
            "rmqkit_proxy_clients": {(): len(clients)},
            "rmqkit_proxy_streams": {(): sum(client.stream is not None for client in clients)},
            "rmqkit_proxy_calls": {(): sum(client.calls for client in clients)},
            "rmqkit_proxy_answers_total": {
                (name, code): count for (name, code), count in sorted(endpoint.answered.items())
            },
            "rmqkit_proxy_held_messages": {(): endpoint.held_messages},
            **lane_values({}, self._servers),
        }

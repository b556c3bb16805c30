"""What a consumer reads of which topic, as it tells brokers. Source: behaviour.md §8.3, §6.1, §6.2."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from rmqkit.client.runtime.runtime import ClientRuntime
from rmqkit.errors import SettingsError
from rmqkit.filter.subscription import is_tag_type, subscription
from rmqkit.protocol.bodies.clients import SubscriptionData
from rmqkit.protocol.names import topic_fault

__all__ = ["Subscriptions"]


class Subscriptions(dict[str, SubscriptionData]):
    """The subscriptions of one member by topic."""

    def __init__(self, runtime: ClientRuntime, group: str) -> None:
        super().__init__()
        self._runtime = runtime
        self._group = group

    def put(self, topic: str, expression: str, expression_type: str) -> None:
        """Subscribe to a topic, or replace its subscription. Raises SettingsError: one of them is not legal."""
        fault = topic_fault(topic)
        if fault is not None:
            raise SettingsError(fault)
        if not isinstance(expression, str):
            raise SettingsError(
                f"subscription to topic {topic}: {expression!r} is no expression: use '*' or 'A || B'; a handler goes"
                " in handler="
            )
        version = self._version(topic)
        try:
            self[topic] = subscription(topic, expression, expression_type=expression_type, version=version)
        except ValueError as error:
            raise SettingsError(f"subscription to topic {topic}: {error}") from None

    def renew_versions(self, topics: Iterable[str]) -> None:
        """Have brokers take these subscriptions for newer than what other members told them."""
        for topic in self.keys() & topics:
            self[topic] = replace(self[topic], sub_version=self._version(topic))

    def _version(self, topic: str) -> int:
        """The time, and more than before also when the clock was set back: brokers keep the highest version."""
        before = self[topic].sub_version if topic in self else 0
        return max(self._runtime.clock.now_ms(), before + 1)

    async def check(self) -> None:
        """Have a broker say whether it can filter by the expressions that are not tags.
        Raises PeerRefused: it cannot. Raises RemotingError: it did not answer."""
        for topic, data in list(self.items()):
            brokers = self._runtime.routes.brokers_of(topic)
            if not is_tag_type(data.expression_type) and brokers:
                address = self._runtime.routes.any_address(brokers[0])
                assert address is not None, "a broker of a route has an address"
                await self._runtime.calls.check_subscription(address[1], self._runtime.client_id, self._group, data)

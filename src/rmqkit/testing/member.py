"""The consumer of the fixture ``rmq_consumer`` in tests without an event loop."""

from __future__ import annotations

from typing import Any

from rmqkit import sync

__all__ = ["Member"]


class Member(sync.PushConsumer):
    """A `rmqkit.sync.PushConsumer` that starts with its first subscription: before that it could receive nothing."""

    def _subscribe(self, *arguments: Any) -> None:
        super()._subscribe(*arguments)
        if self.is_new:
            self.start()

"""The clients for programs without an event loop, under the name programs import: see `rmqkit.client.sync.facade`."""

from __future__ import annotations

import sys

from rmqkit.client.sync import facade as sync
from rmqkit.client.sync.facade import PopConsumer, Producer, PullConsumer, PushConsumer, TransactionProducer, run

__all__ = ["PopConsumer", "Producer", "PullConsumer", "PushConsumer", "TransactionProducer", "run"]

sys.modules[__name__] = sync  # one module under both names: `from rmqkit import sync` gives the same whoever came first

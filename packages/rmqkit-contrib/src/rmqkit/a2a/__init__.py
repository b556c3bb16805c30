"""Task events of A2A agents in streams, for the official A2A SDK::

    from a2a.server.request_handlers import DefaultRequestHandler
    from rmqkit.a2a import TaskStreams

    task_streams = TaskStreams(rmqkit.streams.embedded("data", expire_after=3600))
    handler = DefaultRequestHandler(executor, task_store, card, event_stream=task_streams)

A client that lost its connection subscribes to its task again, at any process, and gets the events that it missed and
new ones. This package needs the extra ``a2a``.

===============  ===================================================================================================
`task_streams`   `TaskStreams`, the SDK's `TaskEventStream`
===============  ===================================================================================================
"""

from __future__ import annotations

from rmqkit import extras

with extras.needed("a2a", "rmqkit.a2a"):
    from rmqkit.a2a.task_streams import TaskStreams

__all__ = ["TaskStreams"]

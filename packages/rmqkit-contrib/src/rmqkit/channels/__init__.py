"""A channel layer for Django Channels, in the settings of a Django project::

    CHANNEL_LAYERS = {
        "default": {
            "BACKEND": "rmqkit.channels.StreamChannelLayer",
            "CONFIG": {"name_servers": "127.0.0.1:9876"},
        },
    }

This package needs the extra ``channels``.

============  ======================================================================================================
`layer`       `StreamChannelLayer`: the methods that Channels calls, on any event loop
`exchange`    the streams of processes and groups, on one event loop
`inbox`       the messages that wait in the channels of this process
============  ======================================================================================================
"""

from __future__ import annotations

from rmqkit import extras

with extras.needed("channels", "rmqkit.channels"):
    from rmqkit.channels.layer import StreamChannelLayer

__all__ = ["StreamChannelLayer"]

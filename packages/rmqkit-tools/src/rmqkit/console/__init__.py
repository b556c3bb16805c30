"""The web console: pages and JSON over what `rmqkit.admin` tells of RocketMQ clusters.

`Console` is an ASGI app, to be served by ``rmq console`` or mounted in a program's own app::

    console = Console("127.0.0.1:9876", read_only=True)
    app.mount("/rmq", console)

======================  ============================================================================================
module                  what it does
======================  ============================================================================================
`app` `routes`          the way of a request: Host, origin, user, view, answer · the table of addresses
`hub`                   what requests share: clusters, connections, sessions
`security` `logins`     what may ask, who it is, sessions, users in a file
`reviews` `audit`       a change is a form, a review, a confirmation and lines in the audit
`watch`                 one task per cluster keeps a snapshot, within a budget of requests; list pages ask nobody
`history` `alerts`      figures over time in a file, and rules that look at them; `figures` says which there are
`notices`               where alerts are sent, and how
`live`                  a page's refreshes, and the tail of a topic, as server-sent events
`render` `charts`       HTML from templates, SVG
`hooks`                 what other packages add: decoders of bodies, pages
`views`                 one file per noun: what a page shows
======================  ============================================================================================

It needs the extra ``console``: Starlette, uvicorn, Jinja2.
"""

from __future__ import annotations

from rmqkit.console.app import Console
from rmqkit.console.asking import own_page
from rmqkit.console.hooks import OwnPage

__all__ = ["Console", "OwnPage", "own_page"]

"""The web console: pages and JSON about RocketMQ clusters, based on `rmqkit.admin`.

`Console` is an ASGI app. ``rmq console`` serves the app, or a program mounts the console in its own app::

    console = Console("127.0.0.1:9876", read_only=True)
    app.mount("/rmq", console)

==========  ========================================================================================================
folder      content
==========  ========================================================================================================
`server`    the ASGI app with the steps of a request, and the server of ``rmq console``
`views`     the pages, one module per noun
`request`   one request and its page, forms, live updates, the table of addresses, the common state of all requests
`jobs`      replays of dead letters
`alerts`    rules that check the figures of each snapshot, and the channels of their notices
`watch`     the task of each cluster that updates its snapshot within a budget of requests; figures and their history
`access`    the checks of requests, logins, the confirmation of a change, the audit
`html`      templates, charts as SVG, static files, the translation of texts
`hooks`     additions of other packages: decoders of bodies, pages, channels
==========  ========================================================================================================

The console needs the extra ``console``: Starlette, uvicorn, Jinja2.
"""

from __future__ import annotations

from rmqkit.extras import needed

with needed("console", "rmqkit.console"):
    from rmqkit.console.hooks import OwnPage
    from rmqkit.console.request.request import own_page
    from rmqkit.console.server.app import Console

__all__ = ["Console", "OwnPage", "own_page"]

"""Server-sent events for browsers: a response that sends a stream of `rmqkit.streams`::

    from fastapi import FastAPI
    from rmqkit.sse import EventStreamResponse

    @app.get("/chats/{chat}")
    async def follow(chat: str) -> EventStreamResponse:
        return EventStreamResponse(streams, chat)

A browser's ``EventSource`` connects again after a lost connection and sends the id of the last event that it received.
The response continues after this event. The response is a plain ASGI application, which FastAPI and Starlette accept as
a response. This package has no dependencies.

==========  ==========================================================================================================
`frames`    the text format of server-sent events
`response`  `EventStreamResponse`: the place of the first event, the status, pings, slow and lost browsers
`shutdown`  `ends_with_server`: the end of open responses when the web server stops
==========  ==========================================================================================================
"""

from rmqkit.sse.response import EventStreamResponse
from rmqkit.sse.shutdown import end_responses, ends_with_server

__all__ = ["EventStreamResponse", "end_responses", "ends_with_server"]

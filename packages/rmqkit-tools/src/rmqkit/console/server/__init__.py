"""The console as an ASGI app and as a separate server."""

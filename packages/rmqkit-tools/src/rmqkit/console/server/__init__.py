"""The console as an ASGI app and as a server of its own."""

"""The transport of commands over TCP, with asyncio. Request codes are plain numbers here.
Source: remoting.md §1, §2."""

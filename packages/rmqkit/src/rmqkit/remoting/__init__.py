"""The transport: commands over TCP on asyncio. Request codes are plain numbers here. Source: remoting.md §1, §2."""

"""The transport: commands over TCP on asyncio. Codes are only numbers here. Source: remoting.md §1, §2."""

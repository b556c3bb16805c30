"""Producers and consumers for asyncio; `rmqkit.sync` has the same clients for programs without an event loop.

Programs call `producer`, `transaction`, `push_consumer`, `pull_consumer` and `pop_consumer`, and read the reports
of `status`. docs/architecture.md describes the other modules.
Source: behaviour.md §7, §8; remoting.md §9.
"""

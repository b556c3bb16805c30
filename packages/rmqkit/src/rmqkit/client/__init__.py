"""Producers and consumers, asyncio first; `rmqkit.sync` is the same for programs without a loop.

Programs call `producer`, `transaction`, `push_consumer`, `pull_consumer` and `pop_consumer`, and read what `status`
tells; what each of the other modules is for stands in docs/architecture.md.
Source: behaviour.md §7, §8; remoting.md §9.
"""

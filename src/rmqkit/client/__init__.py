"""Producers and consumers, asyncio first; `rmqkit.client.sync` is the same for programs without a loop.

====================  ===================================================================================
module                subject
====================  ===================================================================================
`producer`            what programs call to send; `outgoing` prepares messages, `sender` tries brokers
`push_consumer`       what programs call to consume; `rebalance`, `pulling`, `consuming` are its three engines
`pull_consumer`       what programs call to read queues themselves
`process_queue`       the messages of one queue that are being consumed, and the offset that follows from them
`offsets`             a group's offsets, kept here and saved at the brokers
`runtime`             one client instance: connections, routes, heartbeats; `calls` are its typed requests
`routes`, `allocate`  pure: which queues a route gives, which of them a client gets
====================  ===================================================================================

Source: behaviour.md §7, §8; remoting.md §9.
"""

"""Producers and consumers, asyncio first; `rmqkit.client.sync` is the same for programs without a loop.

====================  ===================================================================================
module                subject
====================  ===================================================================================
`producer`            what programs call to send; `outgoing` prepares messages, `sender` tries brokers
`transaction`         the producer whose messages count only if a local transaction commits
`batching`            many messages in few requests; `request_reply` waits for replies; `faults` avoids slow brokers
`push_consumer`       what programs call to have messages handled: `consuming`, or `ordered`
`pull_consumer`       what programs call to ask for messages (`polling`), or to read queues themselves
`membership`          the queues a consumer holds: `rebalance` says which, `locks` keep them, `pulling` reads them
`process_queue`       the messages of one queue that are being consumed, and the offset that follows from them
`offsets`             a group's offsets, kept here and saved at the brokers, or for broadcasting by `local_offsets`
`inquiries`           what brokers ask of consumers, mostly in an operator's name
`runtime`             one client instance: connections, routes, heartbeats; `calls` are its typed requests
`routes`, `allocate`  pure: which queues a route gives, which of them a client gets
====================  ===================================================================================

Source: behaviour.md §7, §8; remoting.md §9.
"""

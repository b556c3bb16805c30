"""Producers and consumers, asyncio first; `rmqkit.client.sync` is the same for programs without a loop.

====================  ===================================================================================
module                subject
====================  ===================================================================================
`producer`            what programs call to send; `outgoing` prepares messages, `sender` tries brokers
`transaction`         the producer whose messages count only if a local transaction commits
`batching`            many messages in few requests; `request_reply` waits for replies; `faults` avoids slow brokers
`push_consumer`       what programs call to have messages handled: `consuming`, or `ordered`
`pull_consumer`       what programs call to ask for messages (`polling`), or to read queues themselves (`scheduled`)
`queries`             stored messages looked up by id and key
`pop_consumer`        what programs call to share queues: `popping` asks, `pop_handles` name, `pop_consuming` handles
`pop_assignment`      which queues are popped and which pulled, as brokers share them out; `pop_loop` pops them
`membership`          one consumer in its group: `subscriptions`; `rebalance` shares queues out, `locks` keep them
`holding`             the queues it holds, from taking to giving up; `pulling` reads them
`watch`               which queues stand still, and why; `status` is what clients tell, `rates` how fast they are
`process_queue`       the messages of one queue that are being consumed, and the offset that follows from them
`offsets`             a group's offsets, kept here and saved at the brokers, or for broadcasting by `local_offsets`
`inquiries`           what brokers ask of consumers, mostly in an operator's name
`hooks`               what clients tell as they act: `tracing` to the trace topic, `telemetry` as OpenTelemetry's spans
`outbound`            namespaces and the VIP port, on every request; `discovery` asks a web server for name servers
`runtime`             one client instance: connections, routes, heartbeats; `calls` are its typed requests
`forks`               what started before a fork is the parent's; `portal` is the loop thread of `sync`
`routes`, `allocate`  pure: which queues a route gives, which of them a client gets
====================  ===================================================================================

Source: behaviour.md §7, §8; remoting.md §9.
"""

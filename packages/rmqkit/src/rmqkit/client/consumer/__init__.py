"""Push and pull consumers: groups, queues, handlers, offsets (DefaultMQPushConsumerImpl,
DefaultLitePullConsumerImpl)."""

"""Consumers that push and pull: groups, queues, handlers, offsets (DefaultMQPushConsumerImpl,
DefaultLitePullConsumerImpl)."""

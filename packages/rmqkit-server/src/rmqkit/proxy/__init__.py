"""The gRPC endpoint for RocketMQ's 5.x SDKs (``MessagingService``); needs the extra ``grpc``."""

"""The gRPC service: clients, and the calls of its methods."""

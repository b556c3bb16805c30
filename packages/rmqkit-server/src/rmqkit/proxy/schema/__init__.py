"""The protobuf messages of the service: checks, statuses, and their conversion to stored records."""

"""ConsumeQueues: where each message of a topic's queue lies in the log."""

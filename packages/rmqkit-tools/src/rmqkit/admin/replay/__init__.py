"""The replay of stored messages, and dead letters, the most frequent source of a replay."""

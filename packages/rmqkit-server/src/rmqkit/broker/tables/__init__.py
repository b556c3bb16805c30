"""The broker's tables of topics, groups, offsets and clients, and the files in which they are stored."""

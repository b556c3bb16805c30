"""What a broker knows of topics, groups, offsets and clients, and the files these are kept in."""

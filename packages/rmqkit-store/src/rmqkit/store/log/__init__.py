"""CommitLog: the files that hold every record, how they reach the disk, and what a start makes of them."""

"""The files of timed messages: the timer log, its wheel, and what a start makes of them."""

"""The files of timed messages: the timer log, the timer wheel, and their recovery at a start."""

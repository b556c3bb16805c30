"""The store of a broker: commit log, consume queues and index, in files and threads, without event loop and sockets."""

"""Messages that a cluster holds: find, list, filter and send them."""

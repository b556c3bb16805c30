"""The messages of a cluster: find, list, filter and send them."""

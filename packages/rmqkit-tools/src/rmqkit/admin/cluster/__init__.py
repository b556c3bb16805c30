"""The servers of a cluster, and the topics, groups, clients and users on them."""

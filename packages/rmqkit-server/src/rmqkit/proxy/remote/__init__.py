"""Brokers over the remoting protocol, as a proxy uses them: requests, caches, users, the remoting port."""

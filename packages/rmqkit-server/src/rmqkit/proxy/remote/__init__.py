"""The use of brokers over the remoting protocol by a proxy: requests, caches, users, the remoting port."""

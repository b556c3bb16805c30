"""One client instance: its connections, routes, typed requests and settings (MQClientInstance)."""

"""Typed requests to brokers and name servers, one method per request code (`MQClientAPIImpl`, `BrokerOuterAPI`)."""

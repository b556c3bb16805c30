"""What tools ask of a broker (AdminBrokerProcessor, ClientManageProcessor)."""

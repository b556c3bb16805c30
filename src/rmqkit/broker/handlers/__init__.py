"""What the broker answers, one module per kind of request; each handler is given only the parts it needs."""

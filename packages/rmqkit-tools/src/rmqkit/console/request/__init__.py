"""A request of the console: the table of addresses, the state that requests share, forms, live updates."""

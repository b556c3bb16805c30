"""Users, their policies, and the rights that requests need."""

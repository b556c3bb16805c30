"""Users, their policies, and the right that each request needs."""

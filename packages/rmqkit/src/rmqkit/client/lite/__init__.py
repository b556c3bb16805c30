"""The consumer of lite topics."""

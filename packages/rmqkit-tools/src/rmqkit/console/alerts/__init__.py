"""Alerts of the console: rules over snapshots, and the channels for their notices."""

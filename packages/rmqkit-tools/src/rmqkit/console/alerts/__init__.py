"""Alerts of the console: rules over snapshots, and the channels that their notices go to."""

"""Typed operations on a cluster, from outside: what ``mqadmin`` does, as functions.

`Admin` has one attribute per noun (``admin.topics``, ``admin.brokers`` …), each a class of operations. Its methods ask
through `AdminCalls` and return structs. Nothing here prints; the command line (`rmqkit.cli.admin`) does. Works against
Apache's servers and ours. Source: behaviour.md §9.9.
"""

from rmqkit.admin.api import Admin
from rmqkit.admin.calls import AdminCalls, Done

__all__ = ["Admin", "AdminCalls", "Done"]

"""Typed ``extFields``: one declaration per request or response header, wire names by ``rename``.

Required fields have no default; `rmqkit.protocol.command.decode_header` names the one that is missing.
All classes are public. Source: remoting.md §4.
"""

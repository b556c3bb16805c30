"""Typed requests, one module per noun: header of the request, header of the answer and their bodies together.

Headers are declared once, wire names by ``rename``. Fields that are required have no default;
`rmqkit.protocol.command.decode_header` names the one that is missing. Bodies are JSON in the dialect of
`rmqkit.protocol.fastjson`; absent keys have Java's defaults, unknown ones are passed over. All classes are public.
Source: remoting.md §4, §6.
"""

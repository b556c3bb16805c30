"""Typed requests, one module per noun, with header and body of the request and of the response.

Headers are declared once, with wire names by ``rename``. Required fields have no default;
`rmqkit.protocol.command.decode_header` names the missing field. Bodies are JSON in the dialect of
`rmqkit.protocol.fastjson`; absent keys have Java's defaults, unknown keys are ignored. All classes are public.
Source: remoting.md §4, §6.
"""

"""Typed requests, one module per noun: the headers and bodies of requests and responses.

``rename`` defines the wire names of headers. Required fields have no default, and the error of
`rmqkit.protocol.command.decode_header` names a missing field. Bodies are JSON in the dialect of
`rmqkit.protocol.fastjson`. Missing keys have Java's defaults, and unknown keys are ignored. All classes are public.
Source: remoting.md §4, §6.
"""

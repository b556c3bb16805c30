"""Typed JSON bodies; read with `rmqkit.protocol.fastjson.decode_as`, which also takes Java's dialect.

Field names are the wire's by ``rename="camel"``; all classes are public. Source: remoting.md §6.4.
"""

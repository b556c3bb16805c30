"""What listens at an address that closed the connection or did not answer: TLS, plain, or something else altogether.

A new connection is made to it, with a plain request that any server of the protocol answers, and an empty line behind
it for servers that read lines; when it is closed without a word, another one with a TLS ClientHello. What comes back:

=============================  ===========================================================
what came back                 it is
=============================  ===========================================================
a frame                        a server that takes plain requests
closed; then a TLS record      a server that wants TLS
closed; then closed            nothing we know
anything else                  nothing we know
nothing in time                slow, or waiting: the error that led here says enough
=============================  ===========================================================

Source: remoting.md §1.1, §2.1.
"""

from __future__ import annotations

import asyncio
import contextlib

from rmqkit.errors import ConnectionLost, RemotingError, RequestTimedOut, TlsMismatch, WrongProtocol
from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.command import Command, encode_command
from rmqkit.remoting.address import split_address
from rmqkit.remoting.tls import CLIENT_HELLO, ClientTls, ClientTlsSettings

_PATIENCE_S = 1.0
_TLS_ALERT = 0x15
_SHOWN_BYTES = 24
_TRUST = "trust its signer with --tls-ca (tls.client.trustCertPath), or show a certificate with --tls-cert (…certPath)"


async def diagnosed(error: ConnectionLost | RequestTimedOut, address: str, *, is_encrypted: bool) -> RemotingError:
    """The error that says what is wrong with a peer, or the one given when nothing more can be told."""
    reason = error.reason if isinstance(error, ConnectionLost) else ""
    if is_encrypted and "TLS" in reason and "WRONG_VERSION" not in reason:
        return TlsMismatch(address, reason, _TRUST)
    try:
        said = await _said_to(address, b"".join(encode_command(Command(RequestCode.GET_NAMESRV_CONFIG))) + b"\r\n\r\n")
        if said[:1] == b"\0":  # a frame begins with its length, which is below 16 MiB
            return (
                TlsMismatch(address, "it does not encrypt", "leave TLS out (tls.enable=false)")
                if is_encrypted
                else error
            )
        if said:
            return WrongProtocol(address, f"it answers {said[:_SHOWN_BYTES]!r}")
        hello = ClientTls(ClientTlsSettings(tls_enable=True)).layer().outgoing()
        if (await _said_to(address, hello))[:1] in (bytes([CLIENT_HELLO]), bytes([_TLS_ALERT])):
            return error if is_encrypted else TlsMismatch(address, "it wants TLS", "use --tls (tls.enable=true)")
    except (TimeoutError, OSError):
        return error
    return WrongProtocol(address, "it closes the connection when asked")


async def _said_to(address: str, request: bytes) -> bytes:
    """The first bytes an address answers; empty when it closes. Raises TimeoutError, OSError: it does neither."""
    async with asyncio.timeout(_PATIENCE_S):
        reader, writer = await asyncio.open_connection(*split_address(address))
        try:
            writer.write(request)
            with contextlib.suppress(ConnectionResetError):
                return await reader.read(_SHOWN_BYTES)
            return b""
        finally:
            writer.close()

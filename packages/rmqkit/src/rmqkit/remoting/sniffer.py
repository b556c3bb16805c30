"""The first bytes of an accepted connection: an optional PROXY preamble of a load balancer, then TLS or plain frames.

PROXY v1: ``PROXY TCP4 <source> <destination> <source port> <destination port>\\r\\n``, at most 107 bytes.
PROXY v2: a 12-byte signature, version and command, address family, length, addresses, extensions (ignored here).
The bytes after the preamble are read as if the source had connected directly.
Source: remoting.md §2.1, §2.2 and the published description of the PROXY protocol.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Sequence

from msgspec import Struct

from rmqkit.errors import FrameError
from rmqkit.remoting.address import IpAddress
from rmqkit.remoting.tls import CLIENT_HELLO, OwnCertificate, ServerTls, TlsLayer, TlsMode

_V1_START = b"PROXY "
_V1_BYTES_MAX = 107
_V2_START = b"\r\n\r\n\x00\r\nQUIT\n"
_V2_HEAD_BYTES = 16
_V2_ADDRESS_BYTES = {0x1: 4, 0x2: 16}
_V2_LOCAL, _V2_PROXY = 0x20, 0x21


class ProxyHeader(Struct):
    """A complete preamble. ``size`` is its length, or 0 without a preamble. ``source`` is IP and port of the real peer,
    or None if the balancer sends its own health check or does not know the peer."""

    size: int
    source: tuple[str, int] | None


def parse_proxy_header(data: bytes) -> ProxyHeader | None:
    """Return the preamble at the start of a stream, or None while more bytes are needed.
    Raises FrameError: the stream begins like a preamble, but the preamble is not valid."""
    if data.startswith(_V1_START):
        return _parse_v1(data)
    if data.startswith(_V2_START):
        return _parse_v2(data)
    if data and (_V1_START.startswith(data) or _V2_START.startswith(data)):
        return None
    return ProxyHeader(0, None)


def _parse_v1(data: bytes) -> ProxyHeader | None:
    # Limit the search to the maximum length: a peer could send an endless line, which each read would search again.
    end = data.find(b"\r\n", 0, _V1_BYTES_MAX)
    if end < 0:
        if len(data) >= _V1_BYTES_MAX:
            raise FrameError(f"PROXY header does not end within {_V1_BYTES_MAX} bytes")
        return None
    words = data[:end].split(b" ")
    if words[1:2] == [b"UNKNOWN"]:
        return ProxyHeader(end + 2, None)
    try:
        _, family, source, _, port, _ = (word.decode("ascii") for word in words)
        ip = ipaddress.ip_address(source)
        if family != f"TCP{ip.version}" or not 0 <= int(port) <= 65535:
            raise ValueError(family)
    except ValueError:
        raise FrameError(f"PROXY header {data[:end]!r} cannot be read") from None
    return ProxyHeader(end + 2, (str(ip), int(port)))


def _parse_v2(data: bytes) -> ProxyHeader | None:
    if len(data) < _V2_HEAD_BYTES:
        return None
    command, family = data[12], data[13]
    size = _V2_HEAD_BYTES + int.from_bytes(data[14:16])
    if command not in (_V2_LOCAL, _V2_PROXY):
        raise FrameError(f"PROXY header v2 has version and command {command:#x}: only 0x20 and 0x21 are known")
    if len(data) < size:
        return None
    # LOCAL is the balancer's own health check. An unknown family, such as Unix sockets, has no IP address.
    address_bytes = _V2_ADDRESS_BYTES.get(family >> 4)
    if command == _V2_LOCAL or address_bytes is None:
        return ProxyHeader(size, None)
    ports_at = _V2_HEAD_BYTES + 2 * address_bytes
    if ports_at + 4 > size:
        raise FrameError(f"PROXY header v2 of {size} bytes is too short for its addresses")
    ip = ipaddress.ip_address(data[_V2_HEAD_BYTES : _V2_HEAD_BYTES + address_bytes])
    return ProxyHeader(size, (str(ip), int.from_bytes(data[ports_at : ports_at + 2])))


_HELLO = bytes([CLIENT_HELLO])


class Sniffed(Struct):
    """The result for an accepted connection, after its first bytes.

    Attributes:
        source: IP and port of the real peer according to a balancer, or None.
        tls: the layer that decrypts the following bytes, or None for a plain connection.
        rest: the bytes that were read after the preamble, still encrypted if TLS is used.
    """

    source: tuple[str, int] | None
    tls: TlsLayer | None
    rest: bytes


class ProtocolSniffer:
    """A reader of the first bytes of one connection. If ``tls`` is None, TLS is disabled.
    ``accepts_proxy``: a PROXY preamble is allowed. ``believes``: returns True if preambles from these hops are trusted.
    Other preambles are read and ignored, because any peer can write a preamble."""

    __slots__ = ("_accepts_proxy", "_held", "_source", "_tls", "believes")

    def __init__(
        self,
        tls: ServerTls | None,
        *,
        accepts_proxy: bool,
        believes: Callable[[Sequence[IpAddress]], bool] = lambda hops: False,
    ) -> None:
        self._tls = tls
        self.believes = believes
        self._accepts_proxy = accepts_proxy
        self._source: tuple[str, int] | None = None
        self._held = b""

    def feed(self, data: bytes) -> Sniffed | None:
        """Read data. Return the result, or None while more data or a certificate is needed.
        Raises FrameError: the preamble is damaged, or the mode forbids the kind of connection, TLS or plain."""
        self._held += data
        if self._accepts_proxy:
            header = parse_proxy_header(self._held)
            if header is None:
                return None
            if header.size:
                # Accept only one preamble. The peer itself has written a second preamble, which is not a frame.
                self._accepts_proxy = False
                self._source = header.source
                self._held = self._held[header.size :]
        if not self._held:
            return None
        if self.waits_for is not None:
            return None
        assert self._held, "there is a first byte"
        return Sniffed(self._source, self._layer(self._held[0]), self._held)

    @property
    def waits_for(self) -> OwnCertificate | None:
        """The certificate that must be made before TLS can start, or None. Until then the caller must pause reading."""
        own = None if self._tls is None else self._tls.own
        if own is None or own.is_settled or self._held[:1] != _HELLO:
            return None
        return own

    def _layer(self, first_byte: int) -> TlsLayer | None:
        mode = TlsMode.DISABLED if self._tls is None else self._tls.mode
        if first_byte == CLIENT_HELLO:
            has_own = self._tls is not None and self._tls.own is not None and self._tls.own.context is not None
            if self._tls is None or (mode is TlsMode.DISABLED and not has_own):
                raise FrameError("it begins with a TLS handshake and TLS is disabled: set tls.server.certPath")
            return self._tls.layer()
        if mode is TlsMode.ENFORCING:
            raise FrameError("it is not encrypted and tls.server.mode is enforcing")
        return None

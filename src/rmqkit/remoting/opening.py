"""What the first bytes of an accepted connection say: a balancer's preamble, then TLS or plain frames.

Source: remoting.md §2.1, §2.2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct

from rmqkit.errors import FrameError
from rmqkit.protocol.proxy_header import parse_proxy_header
from rmqkit.remoting.own_certificate import OwnCertificate
from rmqkit.remoting.tls import CLIENT_HELLO, ServerTls, TlsLayer, TlsMode

if TYPE_CHECKING:
    from rmqkit.remoting.connection import IpAddress

__all__ = ["Opened", "Opening"]

_HELLO = bytes([CLIENT_HELLO])


class Opened(Struct):
    """How a connection goes on.

    Attributes:
        source: IP and port a balancer names as the real peer, or None.
        tls: decrypts what follows; None for a plain connection.
        rest: what was read behind the preamble, still encrypted with TLS.
    """

    source: tuple[str, int] | None
    tls: TlsLayer | None
    rest: bytes


class Opening:
    """Looks at the beginning of one connection: ``tls`` None means disabled.
    ``accepts_proxy``: whether a PROXY preamble may come; ``believes``: whether one from this address says who the peer
    is. Anybody can write one, so that of a stranger is read and changes nothing."""

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

    def feed(self, data: bytes) -> Opened | None:
        """Take what was read; None while more is needed to tell.
        Raises FrameError: a damaged preamble, or TLS or its absence where the mode forbids it."""
        self._held += data
        if self._accepts_proxy:
            header = parse_proxy_header(self._held)
            if header is None:
                return None
            if header.size:
                self._accepts_proxy = False
                self._source = header.source
                self._held = self._held[header.size :]
        if not self._held:
            return None
        if self.waits_for is not None:
            return None
        return Opened(self._source, self._layer(self._held[0]), self._held)

    @property
    def waits_for(self) -> OwnCertificate | None:
        """What has to be made before it can be told; nothing more needs to be read until then."""
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

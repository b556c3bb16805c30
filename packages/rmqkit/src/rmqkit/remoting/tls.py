"""TLS on a port that also accepts plain connections. The first byte of a connection decides (``TlsHelper``,
``TlsMode``).

===========  ==========================================  ===============================
mode         first byte 0x16 (a ClientHello)             other first byte
===========  ==========================================  ===============================
disabled     closed (it is not a frame)                  plain
permissive   TLS                                         plain
enforcing    TLS                                         closed, with one log line
===========  ==========================================  ===============================

A permissive port without certificate files uses a certificate that it makes itself (`OwnCertificate`), like Apache's
servers, unless ``tls.test.mode.enable`` is false.

`TlsLayer` passes bytes to the standard library's TLS, because the first bytes are already read from the socket and
cannot be put back. Certificate files are checked at each new connection, and loaded again if they have changed. If the
new files cannot be used, the earlier certificate stays in use. Only TLS 1.2 or newer is accepted. Source: remoting.md
§2.1.
"""

from __future__ import annotations

import asyncio
import enum
import functools
import logging
import ssl
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated

from msgspec import Struct

from rmqkit.errors import FrameError, SettingsError
from rmqkit.settings import Setting

_SECONDS_MAX = 30
_DAYS = 3650
_REQUEST = ("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-sha256")

_log = logging.getLogger(__name__)


class OwnCertificate:
    """The certificate that a server makes when the first peer uses TLS and no certificate files are configured.

    Apache's servers make a certificate at each start (``tls.test.mode.enable``). rmqkit makes one certificate per run
    with the ``openssl`` command, in a thread, while the first peer waits. The certificate is not stored. It protects
    against eavesdropping, but not against a man in the middle, who can make a certificate, too. Use it only on the
    event loop.

    Attributes:
        context: the TLS context, or None if the certificate is not made yet or could not be made.
        is_settled: True after the certificate was made, or could not be made.
    """

    def __init__(self) -> None:
        self.context: ssl.SSLContext | None = None
        self.is_settled = False
        self._waiting: list[Callable[[], None]] = []

    def when_settled(self, go_on: Callable[[], None]) -> None:
        """Call a function after the certificate was made or could not be made. The first call of this method starts the
        making."""
        assert not self.is_settled, "the certificate is not settled yet"
        self._waiting.append(go_on)
        if len(self._waiting) == 1:
            making = asyncio.get_running_loop().run_in_executor(None, make_context)
            making.add_done_callback(self._settle)

    def _settle(self, made: asyncio.Future[ssl.SSLContext]) -> None:
        assert not self.is_settled, "the certificate is made only once"
        waiting, self._waiting = self._waiting, []
        if made.cancelled():  # the loop is closing
            return
        self.is_settled = True
        error = made.exception()
        if error is None:
            self.context = made.result()
            _log.warning(
                "a peer wants TLS and tls.server.certPath is not set: a certificate was made for this run. It protects "
                "against eavesdropping only, because peers cannot verify it; set tls.server.certPath"
            )
        elif isinstance(error, (OSError, subprocess.SubprocessError)):
            _log.warning(
                "a peer wants TLS, tls.server.certPath is not set, and no certificate can be made with the command "
                "openssl (%s): such peers are refused until the next start",
                _reason(error),
            )
        else:
            raise error
        for go_on in waiting:
            go_on()


def make_context() -> ssl.SSLContext:
    """Return a server's TLS context with a new certificate. This takes about 20 ms and works in any thread.
    Raises OSError, subprocess.SubprocessError: openssl is missing or failed."""
    with tempfile.TemporaryDirectory(prefix="rmq-tls-") as folder:
        certificate, key = Path(folder, "own.crt"), Path(folder, "own.key")
        files = ("-out", str(certificate), "-keyout", str(key))
        command = ["openssl", *_REQUEST, "-days", str(_DAYS), "-subj", "/CN=rmqkit", *files]
        subprocess.run(command, check=True, capture_output=True, timeout=_SECONDS_MAX, stdin=subprocess.DEVNULL)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(PROTOCOLS)
        context.load_cert_chain(certificate, key)
    return context


def _reason(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        lines = error.stderr.decode("utf-8", "replace").strip().splitlines()
        return lines[-1] if lines else f"exit code {error.returncode}"
    return str(error)


CLIENT_HELLO = 0x16
# gRPC clients require this answer to their ALPN offer. Remoting clients offer no protocols and get no answer.
PROTOCOLS = ["h2"]
_READ_BYTES = 256 << 10


class TlsMode(enum.Enum):
    """The modes of a port: only plain connections, both kinds, or only TLS."""

    DISABLED = "disabled"
    PERMISSIVE = "permissive"
    ENFORCING = "enforcing"


class NeedClientAuth(enum.Enum):
    """The rules for client certificates."""

    NONE = "none"
    OPTIONAL = "optional"
    REQUIRE = "require"


class ServerTlsSettings(Struct, kw_only=True):
    """The settings of a server in ``tls.properties``. A permissive server without certificate files makes its own
    certificate, if ``makes_own`` is set and client certificates are not required."""

    mode: Annotated[TlsMode, Setting("tls.server.mode", "disabled, permissive or enforcing")] = TlsMode.PERMISSIVE
    makes_own: Annotated[
        bool,
        Setting(
            "tls.test.mode.enable",
            "create a temporary certificate if none is configured (protects only against eavesdropping)",
        ),
    ] = True
    certificate: Annotated[str, Setting("tls.server.certPath", "certificate chain, PEM")] = ""
    key: Annotated[str, Setting("tls.server.keyPath", "private key, PEM")] = ""
    key_password: Annotated[str, Setting("tls.server.keyPassword", "password of the private key", secret=True)] = ""
    trusted: Annotated[str, Setting("tls.server.trustCertPath", "CA certificates for client certificates, PEM")] = ""
    need_client_auth: Annotated[NeedClientAuth, Setting("tls.server.need.client.auth", "none, optional or require")] = (
        NeedClientAuth.NONE
    )


class Tls(Struct, kw_only=True, frozen=True):
    """TLS for every connection of a client: ``Tls(trusted="ca.pem")``. Host names in certificates are not checked,
    because clients connect to the addresses of brokers."""

    trusted: Annotated[str, Setting("tls.client.trustCertPath", "CA certificates for server certificates, PEM")] = ""
    verify: Annotated[
        bool, Setting("tls.client.authServer", "verify the certificates of servers; false encrypts only")
    ] = True
    certificate: Annotated[str, Setting("tls.client.certPath", "client certificate chain, PEM")] = ""
    key: Annotated[str, Setting("tls.client.keyPath", "client private key, PEM")] = ""
    key_password: Annotated[str, Setting("tls.client.keyPassword", "password of the private key", secret=True)] = ""


class ClientTlsSettings(Struct, kw_only=True):
    """The client part of ``tls.properties``, which servers and tools read."""

    tls_enable: Annotated[bool, Setting("tls.enable", "use TLS on every connection")] = False
    tls_verify_server: Annotated[bool, Setting("tls.client.authServer", "verify the certificate of the server")] = False
    tls_trusted: Annotated[str, Setting("tls.client.trustCertPath", "CA certificates for server certificates, PEM")] = (
        ""
    )
    tls_certificate: Annotated[str, Setting("tls.client.certPath", "client certificate chain, PEM")] = ""
    tls_key: Annotated[str, Setting("tls.client.keyPath", "client private key, PEM")] = ""
    tls_key_password: Annotated[str, Setting("tls.client.keyPassword", "password of the private key", secret=True)] = ""

    @property
    def tls(self) -> Tls | None:
        """The TLS settings of connections, or None if connections are plain."""
        if not self.tls_enable:
            return None
        return Tls(
            trusted=self.tls_trusted,
            verify=self.tls_verify_server,
            certificate=self.tls_certificate,
            key=self.tls_key,
            key_password=self.tls_key_password,
        )


class ServerTls:
    """A factory for the TLS side of a server's connections, with the current certificate files.
    Raises SettingsError: the files cannot be used.

    Attributes:
        mode: the mode of the port, or disabled without certificate files.
        own: the certificate for a port without files, or None if it is not allowed.
    """

    def __init__(self, settings: ServerTlsSettings) -> None:
        has_certificate = bool(settings.certificate and settings.key)
        if settings.mode is TlsMode.ENFORCING and not has_certificate:
            raise SettingsError("tls.server.mode=enforcing needs tls.server.certPath and tls.server.keyPath")
        self.mode = settings.mode if has_certificate else TlsMode.DISABLED
        has_files = bool(settings.certificate or settings.key or settings.trusted)
        may_make = settings.mode is TlsMode.PERMISSIVE and settings.makes_own and not has_files
        makes_own = may_make and settings.need_client_auth is not NeedClientAuth.REQUIRE
        self.own = OwnCertificate() if makes_own else None
        self._settings = settings
        self._files = [Path(name) for name in (settings.certificate, settings.key, settings.trusted) if name]
        self._seen = self._file_states()
        self._context = self._load() if self.mode is not TlsMode.DISABLED else None

    @property
    def asks_for_certificates(self) -> bool:
        """Return True if TLS connections need a client certificate."""
        return self.mode is not TlsMode.DISABLED and self._settings.need_client_auth is NeedClientAuth.REQUIRE

    def layer(self) -> TlsLayer:
        """Return the TLS side of a new connection."""
        # The own certificate has no files to check.
        if self.own is not None:
            assert self.own.context is not None, "the certificate has been made"
            return TlsLayer(self.own.context, server_side=True)
        seen = self._file_states()
        if seen != self._seen:
            self._seen = seen  # set it even if the files cannot be used, so that the error is logged only once
            try:
                self._context = self._load()
                _log.info("reloaded certificate files %s", ", ".join(map(str, self._files)))
            except SettingsError as error:
                _log.error("cannot use the changed certificate files: %s", error)
        assert self._context is not None, "TLS is not disabled"
        return TlsLayer(self._context, server_side=True)

    def _file_states(self) -> list[tuple[int, int] | None]:
        """Return the modification time and size of each file, or None for a missing file."""
        seen: list[tuple[int, int] | None] = []
        for path in self._files:
            try:
                status = path.stat()
                seen.append((status.st_mtime_ns, status.st_size))
            except OSError:
                seen.append(None)
        return seen

    def _load(self) -> ssl.SSLContext:
        settings = self._settings
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(PROTOCOLS)
        _load_own(context, settings.certificate, settings.key, settings.key_password)
        if settings.need_client_auth is not NeedClientAuth.NONE:
            _load_trusted(context, settings.trusted)
            is_required = settings.need_client_auth is NeedClientAuth.REQUIRE
            context.verify_mode = ssl.CERT_REQUIRED if is_required else ssl.CERT_OPTIONAL
        return context


@functools.cache
def _warn_unverified() -> None:
    """Log, once in a process, that the certificates of servers are not verified."""
    _log.warning(
        "TLS encrypts, and verifies no server: any program can answer in the place of one; use "
        "Tls(trusted=…) with the PEM file of the servers' CA (tls.client.authServer, tls.client.trustCertPath)"
    )


class ClientTls:
    """A factory for the TLS side of a client's connections.
    Raises SettingsError: the files cannot be used.

    Attributes:
        context: the context, for transports with their own TLS code.
        settings: the settings of the context.
    """

    def __init__(self, settings: Tls) -> None:
        self.settings = settings
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.check_hostname = False  # clients connect to addresses, so only the CA is checked
        context.verify_mode = ssl.CERT_REQUIRED if settings.verify else ssl.CERT_NONE
        if settings.verify:
            _load_trusted(context, settings.trusted)
        else:
            _warn_unverified()
        if settings.certificate:
            _load_own(context, settings.certificate, settings.key, settings.key_password)
        self.context = context

    def layer(self) -> TlsLayer:
        """Return the TLS side of a new connection."""
        return TlsLayer(self.context, server_side=False)


class TlsLayer:
    """The TLS of one connection, from bytes to bytes, without a socket.
    After every call, the owner must write the bytes from `outgoing`."""

    def __init__(self, context: ssl.SSLContext, *, server_side: bool) -> None:
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=server_side)
        self._is_established = False
        self._unsent: list[bytes] = []
        if not server_side:
            self._handshake()

    def feed(self, data: bytes) -> bytes:
        """Decrypt received bytes and return the plain bytes, which may be empty.
        Raises FrameError: the data is not TLS, or the peer is refused."""
        self._incoming.write(data)
        if not self._is_established and not self._handshake():
            return b""
        plain: list[bytes] = []
        try:
            while piece := self._tls.read(_READ_BYTES):
                plain.append(piece)
        except (ssl.SSLWantReadError, ssl.SSLZeroReturnError):
            pass  # all data is decrypted, or the peer closes the connection
        except ssl.SSLError as error:
            raise FrameError(f"TLS failed: {error.reason or error}") from None
        return b"".join(plain)

    def send(self, pieces: Iterable[bytes | bytearray | memoryview]) -> None:
        """Encrypt pieces, or hold them until the handshake is complete."""
        plain = b"".join(pieces)
        if self._is_established:
            self._tls.write(plain)
        else:
            self._unsent.append(plain)

    def outgoing(self) -> bytes:
        """Return the encrypted bytes to write to the peer now."""
        return self._outgoing.read()

    def _handshake(self) -> bool:
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        except ssl.SSLError as error:
            raise FrameError(f"TLS handshake failed: {error.reason or error}") from None
        assert not self._is_established, "the handshake is not complete yet"
        self._is_established = True
        for plain in self._unsent:
            self._tls.write(plain)
        self._unsent.clear()
        return True


def _load_own(context: ssl.SSLContext, certificate: str, key: str, password: str) -> None:
    try:
        context.load_cert_chain(certificate, key or None, password or "")
    except (OSError, ssl.SSLError) as error:
        reason = error.strerror or error
        whose = f"with key {key}" if key else "without a key of its own"
        raise SettingsError(f"certificate {certificate} {whose} cannot be used: {reason}") from None


def _load_trusted(context: ssl.SSLContext, trusted: str) -> None:
    if not trusted:
        raise SettingsError(
            "verifying certificates needs the CA: set trusted to its PEM file (tls.client.trustCertPath or "
            "tls.server.trustCertPath); a client with verify=False encrypts only"
        )
    try:
        context.load_verify_locations(trusted)
    except (OSError, ssl.SSLError) as error:
        raise SettingsError(f"trusted certificates {trusted} cannot be used: {error}") from None

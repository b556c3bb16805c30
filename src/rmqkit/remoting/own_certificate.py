"""A certificate that a server makes for itself, when the first peer wants TLS and no files of one are given.

Apache's servers make one at each start (``tls.test.mode.enable``). Ours make it once per run, with the ``openssl``
command, in a thread, while the peer that asked waits; it lies in no file afterwards. It encrypts against those who only
listen. It proves nothing: who stands between two peers can make one, too.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

__all__ = ["OwnCertificate"]

_SECONDS_MAX = 30
_DAYS = 3650
_REQUEST = ("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-sha256")

_log = logging.getLogger(__name__)


class OwnCertificate:
    """Makes a certificate when it is first wanted; loop only.

    Attributes:
        context: encrypts with it; None until it is made, or when that failed.
        is_settled: whether it was made, or cannot be.
    """

    def __init__(self) -> None:
        self.context: ssl.SSLContext | None = None
        self.is_settled = False
        self._waiting: list[Callable[[], None]] = []

    def when_settled(self, go_on: Callable[[], None]) -> None:
        """Have something called when it is made, or cannot be; the first who wants it has it made."""
        assert not self.is_settled, "nothing is waited for any more"
        self._waiting.append(go_on)
        if len(self._waiting) == 1:
            making = asyncio.get_running_loop().run_in_executor(None, make_context)
            making.add_done_callback(self._settle)

    def _settle(self, made: asyncio.Future[ssl.SSLContext]) -> None:
        waiting, self._waiting = self._waiting, []
        if made.cancelled():  # the loop ends
            return
        self.is_settled = True
        error = made.exception()
        if error is None:
            self.context = made.result()
            _log.warning(
                "a peer wants TLS and tls.server.certPath is not set: a certificate was made for this run. It encrypts "
                "against those who only listen and proves nothing, as anybody can make one; set tls.server.certPath"
            )
        elif isinstance(error, (OSError, subprocess.SubprocessError)):
            _log.warning(
                "a peer wants TLS, tls.server.certPath is not set, and no certificate can be made with the command "
                "openssl (%s): such peers are sent away until the next start",
                _reason(error),
            )
        else:
            raise error
        for go_on in waiting:
            go_on()


def make_context() -> ssl.SSLContext:
    """The server's side of TLS with a new certificate; takes some 20 ms, in any thread.
    Raises OSError, subprocess.SubprocessError: openssl is missing, or failed."""
    with tempfile.TemporaryDirectory(prefix="rmq-tls-") as folder:
        certificate, key = Path(folder, "own.crt"), Path(folder, "own.key")
        files = ("-out", str(certificate), "-keyout", str(key))
        command = ["openssl", *_REQUEST, "-days", str(_DAYS), "-subj", "/CN=rmqkit", *files]
        subprocess.run(command, check=True, capture_output=True, timeout=_SECONDS_MAX, stdin=subprocess.DEVNULL)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(certificate, key)
    return context


def _reason(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        lines = error.stderr.decode("utf-8", "replace").strip().splitlines()
        return lines[-1] if lines else f"exit code {error.returncode}"
    return str(error)

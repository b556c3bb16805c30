"""Self-signed certificates for tests, made with openssl."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

OPENSSL = shutil.which("openssl")
REASON = "openssl, which makes the certificates, is missing"


@dataclass
class Certificate:
    certificate: str
    key: str


def make_certificate(folder: Path, name: str) -> Certificate:
    """Create a self-signed certificate, which is also its own issuer for clients that trust it."""
    certificate, key = folder / f"{name}.crt", folder / f"{name}.key"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "2", "-subj", f"/CN={name}", "-out", str(certificate), "-keyout", str(key)]
    subprocess.run(command, check=True, capture_output=True)
    return Certificate(str(certificate), str(key))

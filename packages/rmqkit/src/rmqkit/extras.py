"""Extras: packages that rmqkit uses only where they are installed, and how an installation gets them.

``pip install rmqkit`` brings what a client needs. A package that only servers, the command line or Spark need belongs
to an extra (``[project.optional-dependencies]``). It is imported where it is used, inside `needed`, so that who lacks
it reads one line with the command that brings it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rmqkit.errors import ExtraMissing

__all__ = ["install", "needed"]

_PACKAGES = {
    "fast_depends": "faststream",
    "google": "protobuf",
    "grpc": "grpcio",
    "grpc_status": "grpcio-status",
    "opentelemetry": "OpenTelemetry",
    "prometheus_client": "prometheus-client",
    "py4j": "pyspark",
}
"""Modules whose package has another name."""


@contextmanager
def needed(extra: str, what: str) -> Iterator[None]:
    """Import packages of an extra in this block, for ``what``.

    Raises:
        ExtraMissing: one of them is not installed.
    """
    try:
        yield
    except ImportError as error:
        module = (error.name or str(error)).partition(".")[0]
        if module == "rmqkit":
            raise  # a fault of ours
        package = _PACKAGES.get(module, module)
        if not isinstance(error, ModuleNotFoundError):  # it is there, and lacks a name
            package = f"another release of {package}"
        raise ExtraMissing(what, package, install(extra)) from None


def install(extra: str) -> str:
    """The command that adds an extra to this installation. It names the checkout, wheel or repository that rmqkit was
    installed from, and `rmqkit` only where it came from a package index."""
    return f"pip install {_origin(f'[{extra}]')}"


def _origin(extra: str) -> str:
    # Only who lacks a package comes here, so these are imported late.
    import json
    from importlib.metadata import PackageNotFoundError, distribution
    from pathlib import Path
    from urllib.parse import urlsplit
    from urllib.request import url2pathname

    try:
        found = json.loads(distribution("rmqkit").read_text("direct_url.json") or "{}")
    except PackageNotFoundError:  # a folder on PYTHONPATH
        found = {}
    url = str(found.get("url", ""))
    if version_control := found.get("vcs_info", {}).get("vcs"):
        return f"'rmqkit-checkout{extra} @ {version_control}+{url}'"
    place = Path(url2pathname(urlsplit(url).path)) if url.startswith("file:") else None
    if place is None or not place.exists():
        return f"'rmqkit{extra}'"
    if place.is_file():  # a wheel: those of the other packages lie beside it
        return f"--find-links '{place.parent}' '{place}{extra}'"
    return f"'{place.parents[1]}{extra}'"  # a checkout, whose packages this is one of

"""Extras: optional packages, and the commands that install them.

``pip install rmqkit`` installs the packages for a client. Packages for servers, the command line or Spark belong to
extras (``[project.optional-dependencies]``). The code that uses such a package imports it inside `needed`. If the
package is missing, the user sees one line with the command that installs it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rmqkit.errors import ExtraMissing

__all__ = ["install", "needed"]

_PACKAGES = {
    "a2a": "a2a-sdk",
    "fast_depends": "faststream",
    "google": "protobuf",
    "grpc": "grpcio",
    "grpc_status": "grpcio-status",
    "opentelemetry": "OpenTelemetry",
    "prometheus_client": "prometheus-client",
    "py4j": "pyspark",
}
"""Module → name of its package, if the names differ."""


@contextmanager
def needed(extra: str, what: str) -> Iterator[None]:
    """Return a context manager for imports of an extra's packages. ``what``: the feature that needs the packages.

    Raises:
        ExtraMissing: a package is not installed, or lacks a name.
    """
    try:
        yield
    except ImportError as error:
        module = (error.name or str(error)).partition(".")[0]
        if module == "rmqkit":
            raise  # a defect of rmqkit
        package = _PACKAGES.get(module, module)
        if not isinstance(error, ModuleNotFoundError):  # installed, but a name is missing
            package = f"another release of {package}"
        raise ExtraMissing(what, package, install(extra)) from None


def install(extra: str) -> str:
    """Return the command that adds an extra to this installation.

    The command contains the checkout, wheel or repository from which rmqkit was installed, or only `rmqkit` after an
    installation from a package index.
    """
    return f"pip install {_origin(f'[{extra}]')}"


def _origin(extra: str) -> str:
    # Import these modules here, because they are needed only if a package is missing.
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
    if place.is_file():  # a wheel: the wheels of the other packages are beside it
        return f"--find-links '{place.parent}' '{place}{extra}'"
    return f"'{place.parents[1]}{extra}'"  # one package of a checkout

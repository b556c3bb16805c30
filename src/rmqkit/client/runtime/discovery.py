"""Name servers from a web server (``TopAddressing``): it answers a GET with ``host:port;host:port``.

It is asked only when no name server is given, at the start and then every 2 minutes. Source: remoting.md §9.2.
"""

from __future__ import annotations

import asyncio

from rmqkit.client.runtime.settings import ClientSettings
from rmqkit.errors import NoRoute
from rmqkit.remoting.address import split_addresses

__all__ = ["address_url", "discover"]

_BYTES_MAX = 1 << 20


async def discover(settings: ClientSettings) -> list[str]:
    """The name servers. Raises NoRoute: the web server does not answer, or with something else."""
    url = address_url(settings)
    try:
        return split_addresses(await asyncio.to_thread(_get, url, settings.api_timeout_ms / 1000.0))
    except (OSError, ValueError) as error:
        raise NoRoute(f"{url} does not say where name servers are: {error}") from None


def address_url(settings: ClientSettings) -> str:
    """Where name servers are asked for; port 8080 unless the domain has one."""
    domain = settings.name_server_domain
    host = domain if ":" in domain else f"{domain}:8080"
    unit = f"-{settings.unit_name}?nofix=1" if settings.unit_name else ""
    return f"http://{host}/rocketmq/{settings.name_server_subgroup}{unit}"


def _get(url: str, timeout_seconds: float) -> str:
    import urllib.request  # few programs need it, and it takes 20 ms

    with urllib.request.urlopen(url, timeout=timeout_seconds) as answer:
        text: str = answer.read(_BYTES_MAX).decode()
    return text.strip()

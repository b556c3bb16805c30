"""Fixtures of the broker's tests."""

from collections.abc import AsyncIterator

import pytest

from rmqkit.standalone import Standalone
from tests.broker.cluster import Cluster, serving


@pytest.fixture
async def cluster(tmp_path) -> AsyncIterator[Cluster]:
    """A name server, a broker of default settings, and a client connection."""
    async with Cluster(tmp_path / "store") as it:
        yield it


@pytest.fixture
async def servers(tmp_path) -> AsyncIterator[Standalone]:
    """A name server and a broker of default settings that know no users."""
    async with serving(tmp_path) as it:
        yield it

"""Fixtures of the name server's tests."""

from collections.abc import AsyncIterator

import pytest

from tests.namesrv.running import Asker, serving


@pytest.fixture
async def ask(tmp_path) -> AsyncIterator[Asker]:
    """Yield a client of a name server with default settings."""
    async with serving(tmp_path) as it:
        yield it

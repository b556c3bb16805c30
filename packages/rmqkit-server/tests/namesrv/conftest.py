"""Fixtures of the name server's tests."""

from collections.abc import AsyncIterator

import pytest

from tests.namesrv.running import Asker, serving


@pytest.fixture
async def ask(tmp_path) -> AsyncIterator[Asker]:
    """Asks a name server of default settings."""
    async with serving(tmp_path) as it:
        yield it

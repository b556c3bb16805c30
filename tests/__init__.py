"""Tests of everything under one name: `tests.client` is packages/rmqkit/tests/client."""

from pathlib import Path

__path__ = [*__path__, *map(str, sorted(Path(__file__).parents[1].glob("packages/*/tests")))]

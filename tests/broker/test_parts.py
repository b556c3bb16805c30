"""What a broker keeps is written at a stop, table by table."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from rmqkit.broker.context import BrokerContext
from rmqkit.errors import StoreUnavailable


def test_a_table_that_cannot_be_written_keeps_no_other_from_it():
    written = []

    class Table:
        def __init__(self, name):
            self.name = name

        def persist(self):
            written.append(self.name)
            if self.name in ("pops", "topics"):
                raise StoreUnavailable(self.name)

    names = ["pops", "topics", "groups", "offsets", "filters"]
    with pytest.raises(StoreUnavailable):
        BrokerContext.persist(SimpleNamespace(**{name: Table(name) for name in names}))
    assert written == names

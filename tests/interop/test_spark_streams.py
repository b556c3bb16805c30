"""A stream over Apache's broker under faults, in short; ``make kill T=streams`` is the long form."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.spark.servers import APACHE
from tests.faults.spark.test_streams import check_stream
from tests.interop.kit import ApacheKit


@pytest.mark.faults
@pytest.mark.spark
def test_every_acknowledged_message_is_in_the_result_once(apache_kit: ApacheKit, tmp_path: Path) -> None:
    check_stream(APACHE, tmp_path)

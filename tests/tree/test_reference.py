"""The generated reference pages are what the code says now."""

from __future__ import annotations

import asyncio
import logging

from docs.catalog import CATALOG, Server
from docs.generate import CODES_PAGE, codes_page, served_codes

from rmqkit.protocol.codes import RequestCode


def test_the_page_of_request_codes_is_up_to_date(tmp_path, caplog):
    with caplog.at_level(logging.CRITICAL):  # most of the requests are refused, and said so
        served = asyncio.run(served_codes(tmp_path))
    assert RequestCode.SEND_MESSAGE_V2 in served[Server.BROKER]
    assert RequestCode.GET_ROUTEINFO_BY_TOPIC in served[Server.NAME_SERVER]
    assert set().union(*served.values()) <= set(CATALOG)
    assert CODES_PAGE.read_text(encoding="utf-8") == codes_page(served), "run .venv/bin/python docs/generate.py"

"""The recorded conversation of a real 5.4.0 slave with a real 5.4.0 master (see golden/README.md)."""

from __future__ import annotations

import base64
import gzip
import json
from dataclasses import dataclass
from typing import Any

from tests.sources import ROOT

__all__ = ["Exchange", "exchanges", "ha_frames"]

_PATH = ROOT / "tests" / "golden" / "ha-conversation-5.4.0.json.gz"


@dataclass(frozen=True)
class Exchange:
    """One request of the slave and the master's answer. ``port``: ``fast`` or ``main``."""

    port: str
    code: int
    fields: dict[str, str]
    answer_fields: dict[str, str]
    answer: bytes


def _events() -> list[dict[str, Any]]:
    with gzip.open(_PATH) as file:
        events: list[dict[str, Any]] = json.load(file)["events"]
    return events


def exchanges() -> list[Exchange]:
    """Return the last request of every code to the master, in the order of a full round."""
    asked: dict[tuple[int, int], dict[str, Any]] = {}
    found: dict[int, Exchange] = {}
    for event in _events():
        if "header" not in event or event["link"] not in ("slave-master-port", "slave-master-fast-port"):
            continue
        header, pair = event["header"], (event["conn"], event["header"]["opaque"])
        if event["from"] == "slave":
            asked[pair] = header
            continue
        request = asked.pop(pair)
        body = base64.b64decode(event["bodyBase64"]) if "bodyBase64" in event else event["body"].encode()
        port = "fast" if event["link"] == "slave-master-fast-port" else "main"
        fields, answer_fields = request.get("extFields", {}), header.get("extFields", {})
        found.pop(request["code"], None)
        found[request["code"]] = Exchange(port, request["code"], fields, answer_fields, body)
    return list(found.values())


def ha_frames() -> list[tuple[int, bytes]]:
    """Return the frames that the master sent on the HA link: physical offset and data (empty for a heartbeat)."""
    sent = [event for event in _events() if event["link"] == "slave-master-ha-port" and event.get("from") == "server"]
    return [(event["offset"], base64.b64decode(event.get("data", ""))) for event in sent]

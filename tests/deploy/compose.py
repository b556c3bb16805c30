"""The compose files, as a container engine reads them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from tests.deploy.images import instruction
from tests.deploy.pods import DEPLOY, documents

FOLDER = DEPLOY / "compose"
(COMPOSE,), (CLUSTER,) = (documents(FOLDER / name) for name in ("compose.yaml", "cluster.yaml"))


def interpolated(text: str, **variables: str) -> str:
    """Return a text with its ``${NAME:-default}`` replaced."""
    return re.sub(r"\$\{(\w+):-([^}]*)\}", lambda match: variables.get(match[1]) or match[2], text)


def environment(service: Mapping[str, Any], **variables: str) -> dict[str, str]:
    """Return the variables of a service."""
    return {name: interpolated(str(text), **variables) for name, text in service["environment"].items()}


def words(service: Mapping[str, Any]) -> list[str]:
    """Return the command of a service's container, without the entry point."""
    return service.get("command") or json.loads(instruction(service["build"]["target"], "CMD"))

"""The Containerfile, stage by stage."""

from __future__ import annotations

import re

from tests.deploy.pods import DEPLOY

CONTAINERFILE = re.sub(r"\\\n\s*", " ", (DEPLOY / "container/Containerfile").read_text())
STAGES = {
    match[1]: [tuple(line.split(maxsplit=1)) for line in match[2].strip().splitlines() if line and line[0] != "#"]
    for match in re.finditer(r"^FROM \S+ AS (\w+)\n(.*?)(?=^FROM|\Z)", CONTAINERFILE, re.MULTILINE | re.DOTALL)
}
IMAGES = {name for name in STAGES if name not in ("build", "base")}


def instruction(stage: str, name: str) -> str:
    (text,) = (rest for word, rest in STAGES[stage] if word == name)
    return text


def user_of_image() -> str:
    return instruction("base", "USER").partition(":")[0]

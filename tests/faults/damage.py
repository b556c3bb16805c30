"""Random damage to stopped stores, ``make kill T=damage``: every loss is logged, and only real messages are served.

    python -m tests.faults.damage [--rounds 500] [--seed S]

A round copies a store that a broker wrote and that was stopped or killed (`damage_stores`: several topics, queues, log
files, keys, delays, timed, half and popped messages, configuration files with backups), damages one of its files (bytes
flipped, zeros, cut, missing, exchanged with another file of its kind) and runs `verify`. The store is opened with a
clock ten minutes later, delivers all messages that are due, and is read completely: in half of the rounds with a broker
and a client, else with store and timer alone. Then these must hold:

- a WARNING or ERROR reports every message that is missing, has another body or is not delivered, with the damaged
  file, a place in it or an amount; or the start is refused in one line with a remedy;
- every answer consists of whole records of the requested queue;
- there is no traceback: only a `StoreError` is raised, and nothing is logged with an exception;
- a line names each configuration file that is unreadable or missing;
- ``verify`` also finds what the start reports or refuses, and the keys that find no message.

Not checked: changes that no checksum of the format covers and no other file contradicts, such as a property's text.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import re
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from msgspec import Struct, field

from rmqkit.errors import StoreError
from rmqkit.store.offline.check import verify
from rmqkit.store.offline.file_check import is_json
from tests.faults.damage_stores import (
    Found,
    Sound,
    copy_sparsely,
    found_by_broker,
    found_by_store,
    settings,
    sound_store,
)

ROUNDS = 500
HOWS = ("flip", "flip", "zero", "zero all", "cut", "missing", "exchange")
_AMOUNT = re.compile(r"\b[1-9]\d* (?:\w+ )?(?:messages?|bytes|entries|records|units|queues|topics|files)\b")
_NUMBER = re.compile(r"\d+")
_LOG_BYTES = settings().commit_log_file_bytes


class Damage(Struct):
    """The damage, and the damaged files, relative to the store."""

    what: str
    files: list[Path]

    def is_told(self, text: str) -> bool:
        """Return True if a text names one of the files, a place in one, or an amount."""
        return bool(_AMOUNT.search(text)) or any(_names(path, text) for path in self.files)


class Round(Struct):
    """The result of one damage."""

    seed: int
    what: str = ""
    verdict: str = ""
    outcome: str = ""
    lost: int = 0
    failures: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return f"--seed {self.seed} --rounds 1: {self.what}; verify: {self.verdict}; start: {self.outcome}"


class _Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.told: list[str] = []
        self.tracebacks: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.told.append(record.getMessage())
        if record.exc_info:
            self.tracebacks.append(record.getMessage())


@contextmanager
def heard() -> Iterator[_Heard]:
    """Capture all log lines at WARNING or above, instead of printing them."""
    logger, handler = logging.getLogger("rmqkit"), _Heard()
    before = logger.propagate, logger.level
    logger.addHandler(handler)
    logger.propagate = False
    logger.setLevel(logging.WARNING)
    try:
        yield handler
    finally:
        logger.removeHandler(handler)
        logger.propagate, logger.level = before


def _names(path: Path, text: str) -> bool:
    """Return True if a text names a file, its queue, or a place of the commit log in it."""
    kind = path.parts[0]
    if str(path) in text or (kind != "commitlog" and path.name in text):
        return True
    if kind == "commitlog":
        places = map(int, _NUMBER.findall(text))
        return any(int(path.name) <= place < int(path.name) + _LOG_BYTES for place in places)
    if kind == "consumequeue":
        return f"{path.parts[1]}-{path.parts[2]}" in text
    return kind.startswith("timer") and ("timer log" in text or "timer wheel" in text)


# ---- damage


def damage_one(root: Path, chance: random.Random) -> Damage:
    """Damage one file once."""
    kinds: dict[str, list[Path]] = {}
    for path in sorted(path for path in root.rglob("*") if path.is_file() and path.name != "lock"):
        kinds.setdefault(path.relative_to(root).parts[0], []).append(path)
    kind = chance.choice(sorted(kinds) + ["commitlog"] * 3)
    path = chance.choice(kinds[kind])
    how = chance.choice(HOWS)
    name = path.relative_to(root)
    content = path.read_bytes()
    used = max(1, len(content.rstrip(b"\0")))
    if how == "missing":
        path.unlink()
    elif how == "exchange" and len(kinds[kind]) > 1:
        other = chance.choice([one for one in kinds[kind] if one != path])
        path.write_bytes(other.read_bytes())
        other.write_bytes(content)
        return Damage(f"{name} exchanged with {other.relative_to(root)}", [name, other.relative_to(root)])
    elif how == "cut":
        at = chance.randrange(len(content)) if content else 0
        path.write_bytes(content[:at])
        return Damage(f"{name} cut at {at}", [name])
    elif how == "zero all":
        path.write_bytes(bytes(len(content)))
    elif how == "zero":
        at, size = chance.randrange(used), chance.choice([1, 20, 512, 4096])
        zeros = bytes(min(size, len(content) - at))
        path.write_bytes(content[:at] + zeros + content[at + len(zeros) :])
        return Damage(f"{len(zeros)} zeros in {name} at {at}", [name])
    else:
        at, bit = chance.randrange(used), chance.randrange(8)
        changed = bytearray(content or b"\0")
        changed[at] ^= 1 << bit
        path.write_bytes(changed)
        return Damage(f"bit {bit} of {name} flipped at {at}", [name])
    return Damage(f"{name}: {how}", [name])


# ---- a round


class Judge:
    """A judge of rounds over one undamaged store, which knows the warnings of a normal start."""

    def __init__(self, sound: Sound) -> None:
        self._sound = sound
        self._usual: dict[bool, set[str]] = {True: set(), False: set()}

    async def begin(self, folder: Path) -> None:
        """Start an undamaged copy in both ways, and check that no message is lost."""
        for has_broker in self._usual:
            root, done = folder / "undamaged", Round(0)
            copy_sparsely(self._sound.root, root)
            assert not _verify(root, done), done.verdict
            with heard() as ears:
                await self._start(root, done, has_broker=has_broker)
            shutil.rmtree(root)
            assert not done.lost and not done.failures, f"{done} {done.failures}"
            self._usual[has_broker] = {_pattern(text, root) for text in ears.told}

    async def judge(self, root: Path, seed: int) -> Round:
        """Damage a copy of the store, start it and judge."""
        done = Round(seed)
        copy_sparsely(self._sound.root, root)
        damage = damage_one(root, random.Random(f"{seed} damage"))
        has_broker = random.Random(f"{seed} way").random() < 0.5
        done.what = f"{self._sound.root.name}, {'broker' if has_broker else 'store'}: {damage.what}"
        unreadable = [path for path in damage.files if _is_config(path) and _is_unreadable(root / path)]
        is_found = _verify(root, done)
        with heard() as ears:
            found = await self._start(root, done, has_broker=has_broker)
        done.failures += [f"a traceback: {text}" for text in ears.tracebacks]
        told = [text for text in ears.told if _pattern(text, root) not in self._usual[has_broker]]
        done.outcome += f", told: {told[:3]}" if told else ""
        is_refused = done.outcome.startswith("refused")
        if done.lost and not any(map(damage.is_told, told)):
            done.failures.append(f"{done.lost} messages are lost in silence")
        for path in unreadable if has_broker and not is_refused else ():
            if not any(path.name in text for text in told):
                done.failures.append(f"{path.name} is not told of")
        is_missed = found is not None and bool(found.missing_keys)
        is_damage_told = any(map(damage.is_told, told))
        if (done.lost or is_refused or is_damage_told or is_missed) and not is_found:
            done.failures.append("verify said that the store is sound")
        return done

    async def _start(self, root: Path, done: Round, *, has_broker: bool) -> Found | None:
        sound = self._sound
        try:
            if has_broker:
                found = await found_by_broker(sound, root, done.failures)
            else:
                found = await found_by_store(root, done.failures)
        except StoreError as error:
            done.outcome = f"refused: {error}"
            if len(str(error).splitlines()) != 1 or ":" not in str(error):
                done.failures.append("a refusal is one line with a remedy")
            return None
        except Exception as error:  # noqa: BLE001 - anything else is what is looked for
            done.outcome = "raised"
            done.failures.append(f"the start raised {_place(error)}")
            return None
        lost = [key for key, body in sound.bodies.items() if found.bodies.get(key) != body]
        coming = sound.coming
        if has_broker:
            coming = coming + type(coming)([(False, sound.half.body)])
        else:  # only a broker delivers delayed and retried messages
            coming = type(coming)({one: count for one, count in coming.items() if one[1].startswith(b"timed")})
        late = coming - found.coming
        done.lost = len(lost) + late.total()
        done.outcome = f"{done.lost} lost ({lost[:2]}, late {list(late)[:2]}), {len(found.missing_keys)} keys missing"
        return found


def _pattern(text: str, root: Path) -> str:
    """Return a text without its numbers and without the path of the store."""
    return _NUMBER.sub("#", text.replace(str(root), ""))


def _is_config(path: Path) -> bool:
    return path.parts[0] == "config" and path.name.endswith(".json")


def _is_unreadable(path: Path) -> bool:
    """Return True if a file is unreadable, or missing although its backup exists. Other missing files never existed."""
    return is_json(path) is not None if path.is_file() else path.with_name(path.name + ".bak").is_file()


def _verify(root: Path, done: Round) -> bool:
    """Return True if verify finds or reports a fault."""
    with heard() as ears:
        try:
            report = verify(root, settings())
        except StoreError as error:
            done.verdict = f"refused: {error}"
            return True
        except Exception as error:  # noqa: BLE001 - anything else is what is looked for
            done.failures.append(f"verify raised {_place(error)}")
            return True
    findings = [str(one) for one in report.findings] + ears.told
    done.verdict = f"{len(findings)} findings, {findings[0]}" if findings else "sound"
    return bool(findings)


def _place(error: Exception) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} in {Path(frame.filename).name}:{frame.lineno}: {error}"


@contextmanager
def hurried() -> Iterator[None]:
    """Replace waits for the disk and for delay levels by no wait, and log nothing."""
    with (
        mock.patch("os.fsync", return_value=None),
        mock.patch("os.fdatasync", return_value=None),
        mock.patch("rmqkit.broker.delay.levels._LOOK_MS_MAX", 5),
        mock.patch("rmqkit.broker.delay.levels._PAUSE_MS_MIN", 0),
        heard(),
    ):
        yield


async def rounds(seeds: list[int], folder: Path, *, tell: Callable[[Round], None] = lambda done: None) -> list[Round]:
    """Run a round for each seed, over a stopped and a killed store. ``tell`` is called with each finished round."""
    results = []
    with hurried():
        judges = [Judge(await sound_store(folder, is_clean=is_clean)) for is_clean in (True, False)]
        for one in judges:
            await one.begin(folder)
        for seed in seeds:
            root = folder / f"round-{seed}"
            results.append(await random.Random(seed).choice(judges).judge(root, seed))
            tell(results[-1])
            shutil.rmtree(root, ignore_errors=True)
    return results


def _tell_failed(done: Round) -> None:
    if done.failures:
        print(f"FAILED {done}\n  " + "\n  ".join(done.failures), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.faults.damage", description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--seed", type=int, help="first seed (random)")
    given = parser.parse_args()
    seed = random.randrange(1 << 30) if given.seed is None else given.seed
    print(f"damage: {given.rounds} rounds from --seed {seed} on", flush=True)
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        results = asyncio.run(rounds(list(range(seed, seed + given.rounds)), Path(folder), tell=_tell_failed))
    bad = [one for one in results if one.failures]
    if given.rounds == 1:
        print(results[0])
    refused = sum(one.outcome.startswith("refused") for one in results)
    losing = sum(one.lost > 0 for one in results)
    print(
        f"damage: {len(results)} rounds, {refused} refused, {losing} lost messages and said so, {len(bad)} FAILED, "
        f"{time.monotonic() - begun:.0f} s"
    )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())

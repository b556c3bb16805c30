"""SQL92 filters: our compiler compared with Apache's, and Apache's consumers with our broker and Apache's."""

from __future__ import annotations

import base64
import json
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest

from rmqkit.filter.sql92 import ExpressionRejected, compile_expression
from rmqkit.protocol.properties import encode_properties
from tests.interop.apache import ApachePair
from tests.interop.kit import ApacheKit
from tests.interop.probe import PROBE_HEAP_MB
from tests.interop.standalone import run_standalone

Question = tuple[str, dict[str, str]]

# ---- the compiler

NAMES = ["a", "b", "c", "_d", "zz"]
VALUES = [
    *("7", "7.5", "-7", "+7", " 7", "７", "5", "5.0", "0", "0.0", "-0.0", "1e3", "0x1p3", "NaN", "Infinity"),
    *("2147483648", "-2147483649", "9999999999", "true", "TRUE", "x", "abc", "it's"),
]
TEXTS = ["'7'", "'x'", "''", "'it''s'", "'abc'", "'a'"]
LITERALS = [
    *("7", "5L", "0", "2147483647", "2147483648", "7000000000", "7.5", "5.", ".5e1", "1e3", "0.0"),
    *("TRUE", "false", "NULL", *TEXTS),
]
STRAY = [")", "(", "NOT", "AND", ",", "!", "IS", "--", "-- x\n", "/* y */", "+", "5", "'", "LIKE", "NULL", "$"]


class Expressions:
    """A generator of random expressions, one in five of them with stray tokens. A seed gives the same expressions."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def question(self) -> Question:
        pick = self.random
        properties = {name: pick.choice(VALUES) for name in ("a", "b", "c", "_d") if pick.random() < 0.85}
        tokens = self.any_of(pick.randint(0, 3)).split(" ")
        if pick.random() < 0.2:
            tokens.insert(pick.randrange(len(tokens) + 1), pick.choice(STRAY))
            if pick.random() < 0.5:
                tokens.pop(pick.randrange(len(tokens)))
        return " ".join(tokens), properties

    def any_of(self, depth: int) -> str:
        text = self.equality(depth)
        for _ in range(self.random.choice([0, 0, 1, 2])):
            text += self.random.choice([" AND ", " OR "]) + self.equality(depth)
        return text

    def equality(self, depth: int) -> str:
        text = self.comparison(depth)
        for _ in range(self.random.choice([0, 0, 1, 1, 2])):
            if self.random.random() < 0.7:
                text += f" {self.random.choice(['=', '<>'])} {self.comparison(depth)}"
            else:
                text += f" IS {self.random.choice(['', 'NOT '])}NULL"
        return text

    def comparison(self, depth: int) -> str:
        pick = self.random
        text = self.unary(depth)
        for _ in range(pick.choice([0, 1, 1, 1, 1, 2])):
            kind, inverted = pick.random(), pick.choice(["", "", "NOT "])
            if kind < 0.5:
                text += f" {pick.choice(['>', '>=', '<', '<='])} {self.unary(depth)}"
            elif kind < 0.65:
                text += f" {inverted}{pick.choice(['CONTAINS', 'startswith', 'EndsWith'])} {pick.choice(TEXTS)}"
            elif kind < 0.85:
                text += f" {inverted}BETWEEN {self.unary(depth)} AND {self.unary(depth)}"
            else:
                text += f" {inverted}IN ({','.join(pick.choices(TEXTS, k=pick.randint(1, 3)))})"
        return text

    def unary(self, depth: int) -> str:
        pick = self.random
        kind = pick.random()
        if kind < 0.14:
            return f"{pick.choice(['+', '-', 'NOT'])} {self.unary(depth)}"
        if kind < 0.55:
            return pick.choice(NAMES)
        return pick.choice(LITERALS) if kind < 0.9 or not depth else f"({self.any_of(depth - 1)})"


def ask_apache(kit: ApacheKit, questions: list[Question], work_dir: Path) -> list[str]:
    """Return the results of Apache's compiler: a verdict, `error` or `compile`."""
    lines = [
        " ".join(base64.b64encode(part).decode() for part in (text.encode(), encode_properties(properties)))
        for text, properties in questions
    ]
    command = kit.jvm("interop.SqlOracle", [], heap_mb=PROBE_HEAP_MB, work_dir=work_dir)
    ended = subprocess.run(command, input="\n".join(lines), capture_output=True, text=True, check=False, timeout=300)
    answers = [line.removeprefix("value ").partition(" ")[0] for line in ended.stdout.splitlines()]
    assert len(answers) == len(questions), ended.stderr[-2000:]
    return answers


def our_answer(text: str, properties: dict[str, str]) -> str:
    try:
        verdict = compile_expression(text).evaluate(encode_properties(properties))
    except ExpressionRejected:
        return "compile"
    except ValueError:
        return "error"
    return {True: "true", False: "false", None: "null"}[verdict]


@pytest.mark.parametrize("seed", [92, 2026])
def test_random_expressions_mean_the_same_to_both(apache_kit: ApacheKit, tmp_path: Path, seed: int) -> None:
    expressions = Expressions(seed)
    questions = [expressions.question() for _ in range(5_000)]
    answers = ask_apache(apache_kit, questions, tmp_path)
    assert len(set(answers)) == 5
    differ = [
        (text, properties, answer, ours)
        for (text, properties), answer in zip(questions, answers, strict=True)
        if (ours := our_answer(text, properties)) != answer
    ]
    assert differ == []


# ---- the consumers

GOOD = [
    "a > 5 AND region = 'hangzhou'",
    "a BETWEEN 0 AND 3 OR color IS NOT NULL",
    "price >= 6.0 AND TAGS IN ('even')",
    "region IN ('hangzhou','杭州') AND NOT (a > 10)",
    "color = 'it''s red' OR missing IS NULL AND a > 25",
    "region STARTSWITH 'shang' AND index NOT CONTAINS '1'",
]
BAD = ["a >", "a > 'x'", "5", "a != 3", "a BETWEEN 10 AND 3"]
CONF = {"enablePropertyFilter": "true", "enableCalcFilterBitMap": "true", "enableConsumeQueueExt": "true"}


def run_consumers(kit: ApacheKit, namesrv_addr: str, work_dir: Path) -> list[dict[str, Any]]:
    out = work_dir / "sql.jsonl"
    arguments: list[object] = ["run", "--namesrv", namesrv_addr, "--topic", "SqlConsumers", "--out", out]
    for name, expressions in (("--good", GOOD), ("--bad", BAD)):
        for expression in expressions:
            arguments += [name, expression]
    command = kit.jvm("interop.SqlProbe", arguments, heap_mb=PROBE_HEAP_MB, work_dir=work_dir)
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
    assert ended.returncode == 0, f"{ended.stdout[-2000:]}{ended.stderr[-2000:]}"
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_sql_consumers_of_every_kind_get_the_same_of_both_brokers(
    apache_kit: ApacheKit, apache: ApachePair, tmp_path: Path
) -> None:
    theirs = run_consumers(apache_kit, apache.namesrv_addr, tmp_path)
    conf = tmp_path / "broker.conf"
    conf.write_text("".join(f"{key}={value}\n" for key, value in CONF.items()))
    with run_standalone(tmp_path / "store", tmp_path, "--config", str(conf)) as ours:
        outcome = run_consumers(apache_kit, ours.namesrv_addr, tmp_path)
        ours.stop()
    stored = json.loads((tmp_path / "store/config/consumerFilter.json").read_text())["filterDataByTopic"]
    assert outcome == theirs
    assert [event["outcome"] for event in theirs if event["event"] == "refused"] == ["code 23"] * len(BAD)
    assert set(stored["SqlConsumers"]["groupFilterData"]) >= {f"sql-push-{i}" for i in range(len(GOOD))}

"""Plays the situations of `situations` with Kafka's source and with ours, and prints the outcomes side by side.

    make kill T=beside-kafka
    make kill T=beside-kafka ARGS="--side kafka --only expired,no_topic"

One Spark session plays both sides. Without Java, Maven or Kafka's jars only our side is played. The program fails if an
outcome differs from `outcomes`. ``--page`` prints the table of docs/spark-streams-beside-kafka.md from `outcomes`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import msgspec
from msgspec.structs import replace

from rmqkit.spark import spark_session
from tests.interop.kit import Unavailable
from tests.interop.streams.outcomes import OUTCOMES
from tests.interop.streams.sides import KafkaSide, RocketmqSide
from tests.interop.streams.situations import SITUATIONS, Situation
from tests.interop.streams.stage import Outcome, Side, Stage
from tests.sources import ROOT
from tests.spark.session import SMALL, short_lived


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", choices=["kafka", "rocketmq"], help="play one side only")
    parser.add_argument("--only", help="names of situations, separated by commas")
    parser.add_argument("--json", action="store_true", help="print the outcomes as a line of JSON")
    parser.add_argument("--page", action="store_true", help="play nothing, print the table of the page")
    arguments = parser.parse_args()
    if arguments.page:
        print("\n".join(table()))
        return
    wanted = arguments.only.split(",") if arguments.only else [one.name for one in SITUATIONS]
    if unknown := set(wanted) - {one.name for one in SITUATIONS}:
        sys.exit(f"no situation {', '.join(sorted(unknown))}; there are: {', '.join(one.name for one in SITUATIONS)}")
    chosen = [one for one in SITUATIONS if one.name in wanted]
    sys.path.append(str(ROOT))
    names = [arguments.side] if arguments.side else ["kafka", "rocketmq"]
    found = played(names, chosen)
    if arguments.json:
        print(msgspec.json.encode(found).decode())
        return
    wrong = 0
    for one in chosen:
        print(f"{one.name}: {one.group}. {one.text}")
        for side, outcomes in found.items():
            pair, outcome = OUTCOMES[one.name], outcomes[one.name]
            expected = pair.kafka if side == "kafka" else pair.ours
            wrong += (is_other := plain(outcome) != expected)
            print(f"  {side:9} {shown(outcome)}" + (f"   EXPECTED {shown(expected)}" if is_other else ""))
    print(f"{len(chosen)} situations, {wrong} outcomes differ from the expected ones")
    if wrong:
        sys.exit(1)


def played(names: list[str], chosen: list[Situation]) -> dict[str, dict[str, Outcome]]:
    """Play situations on some sides. Return the outcomes by side and situation."""
    found: dict[str, dict[str, Outcome]] = {}
    with ExitStack() as stack:
        folder = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="rmq-streams-", ignore_cleanup_errors=True))
        )
        sides: list[Side] = []
        kafka: KafkaSide | None = None
        if "kafka" in names:
            try:
                kafka = stack.enter_context(KafkaSide(_made(folder / "kafka")))
                sides.append(kafka)
            except Unavailable as reason:
                print(f"Kafka's side is left out: {reason}", file=sys.stderr)
        if "rocketmq" in names:
            sides.append(stack.enter_context(RocketmqSide(_made(folder / "rocketmq"))))
        conf = {name: value for side in sides for name, value in side.session.items()}
        conf |= {**SMALL, "spark.driver.extraJavaOptions": short_lived(), "spark.sql.session.timeZone": "UTC"}
        spark = spark_session("beside-kafka", "local[2]", conf)
        stack.callback(spark.stop)
        if kafka is not None:
            kafka.attach(spark)
        for number, one in enumerate(chosen):
            for side in sides:
                start = time.monotonic()
                stage = Stage(side, spark, _made(folder / f"{number}-{side.name}"), f"s{number}")
                one.play(stage)
                outcome = found.setdefault(side.name, {})[one.name] = stage.close()
                took_s = time.monotonic() - start
                print(f"{one.name} on {side.name}: {took_s:.1f} s, {shown(outcome)}", file=sys.stderr, flush=True)
    return found


def shown(outcome: Outcome) -> str:
    """Return an outcome in one line."""
    lists = {"read": outcome.read, "not read": outcome.lost, "twice": outcome.twice}
    words = [f"{name} {text}" for name, text in lists.items() if text]
    if outcome.batches:
        words.append(f"{outcome.batches} batch" + ("es" if outcome.batches > 1 else ""))
    return ", ".join([*words, outcome.end]) + (f": {outcome.said}" if outcome.said else "")


def plain(outcome: Outcome) -> Outcome:
    """Return an outcome without the text of the error."""
    return replace(outcome, said="")


def table() -> list[str]:
    """Return the lines of the table of the page."""
    lines = ["| Situation | Kafka's source | `rocketmq` | Reason for the difference |", "|---|---|---|---|"]
    group = ""
    for one in SITUATIONS:
        if one.group != group:
            group = one.group
            lines.append(f"| **{group}** | | | |")
        pair = OUTCOMES[one.name]
        ours = "same" if pair.ours == pair.kafka else shown(pair.ours)
        lines.append(f"| {one.text} | {shown(pair.kafka)} | {ours} | {pair.reason} |")
    return lines


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


if __name__ == "__main__":
    main()

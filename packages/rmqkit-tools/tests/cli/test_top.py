"""`rmq top`: the screen as text and as JSON, and keys on a terminal."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import termios
from datetime import datetime
from pathlib import Path

import pytest

from rmqkit.admin.cluster.clusters import BrokerRow
from rmqkit.admin.diagnosis.top import GroupRow, Report, TopicRow
from rmqkit.broker.settings import BrokerSettings
from rmqkit.cli.admin.top import Sort, screen, sorted_by
from rmqkit.cli.frame.printing import clip
from tests.cli.in_process import rmq
from tests.client.peers import standalone

RMQ = Path(sys.executable).with_name("rmq")
NOON_MS = int(datetime(2026, 1, 31, 12, 0, 5).timestamp() * 1000)
LONG = "the-department-that-has-long-names-for-everything"


def broker(name, number=0, **more):
    return BrokerRow(cluster_name="C", broker_name=name, broker_id=number, addr=f"10.0.0.{number + 1}:10911", **more)


def topic(name, per_second, out, stored):
    return TopicRow(topic=name, in_per_second=per_second, out_per_second=out, stored=stored, groups=1)


def group(name, of, lag, age_ms, out=0.0):
    return GroupRow(group=name, topic=of, out_per_second=out, lag=lag, age_ms=age_ms, members=2)


REPORT = Report(
    time_ms=NOON_MS,
    span_ms=10_000,
    brokers=[
        broker("broker-a", in_tps=1234.5, out_tps=99.96, disk_ratio=0.42, earliest_hours=71.5),
        broker("broker-a", 1, trouble="no answer"),
    ],
    topics=[topic("Orders", 1234.4, 1230, 123_456_789), topic(LONG, None, None, 0), topic("Audit", 0.25, 0.0, 7)],
    groups=[
        group("billing", "Orders", 12_345_678, 3_723_000, 1000.0),
        group(f"{LONG}-group", LONG, 0, None),
        group("audit", "Orders", 2, 400, 230.0),
    ],
)
SCREEN = """\
rmq top · 12:00:05 · rates of 10.0 s · by lag · 127.0.0.1:9876

BROKER      ADDRESS          IN/S  OUT/S  DISK  OLDEST
broker-a    10.0.0.1:10911  1,234  100.0   42%   3.0 d
broker-a:1  10.0.0.2:10911                        away

TOPIC                                           IN/S  OUT/S       STORED  GROUPS
Orders                                         1,234  1,230  123,456,789       1
Audit                                            0.2      0            7       1
the-department-that-ha…g-names-for-everything      -      -            0       1

GROUP                  TOPIC                   OUT/S         LAG    AGE  MEMBERS
billing                Orders                  1,000  12,345,678  1.0 h        2
audit                  Orders                    230           2  0.4 s        2
the-depart…hing-group  the-departm…everything      0           0               2"""


def test_the_screen_fits_80_columns_and_cuts_names_alone():
    lines = screen(REPORT, Sort.LAG).splitlines()
    assert max(map(len, lines)) <= 80
    assert "\n".join(lines) == SCREEN


@pytest.mark.parametrize("columns", [80, 100, 60])
def test_no_number_is_cut_however_narrow_it_is(columns):
    lines = screen(REPORT, Sort.LAG, columns=columns).splitlines()
    assert max(map(len, lines)) <= columns
    assert "12,345,678" in lines[-3] and "123,456,789" in "".join(lines)


def test_rows_that_do_not_fit_are_counted_and_the_note_is_the_last_line():
    many = [group(f"g{number:03}", "Orders", number, 0) for number in range(100)]
    lines = screen(Report(**{**fields(REPORT), "groups": many}), Sort.LAG, lines=24, note="q quits").splitlines()
    assert len(lines) == 24 and lines[-1] == "q quits"
    assert "g099" in "".join(lines) and "… and 90 more" in lines
    few = screen(REPORT, Sort.LAG, lines=40, note="q quits").splitlines()
    assert len(few) == 40 and few[-1] == "q quits" and not any("more" in line for line in few)


def fields(report):
    return {name: getattr(report, name) for name in report.__struct_fields__}


@pytest.mark.parametrize(
    ("sort", "topics", "groups"),
    [
        (Sort.LAG, "OAt", "bat"),
        (Sort.AGE, "OAt", "bat"),
        (Sort.IN, "OAt", "bat"),
        (Sort.OUT, "OtA", "bat"),
        (Sort.NAME, "OtA", "bta"),
    ],
)
def test_rows_are_sorted_by_what_is_asked(sort, topics, groups):
    found = sorted_by(REPORT, sort)
    assert "".join(row.topic[0] for row in found.topics) == topics
    assert "".join(row.group[0] for row in found.groups) == groups


def test_a_text_loses_its_middle():
    assert [clip("abcdefgh", cells) for cells in (8, 7, 4, 2, 1)] == ["abcdefgh", "abc…fgh", "ab…h", "a…", "…"]


# ---------------------------------------------------------------- with servers


@pytest.fixture(scope="module")
def namesrv(tmp_path_factory):
    settings = BrokerSettings(listen_port=0, bind_address="127.0.0.1", broker_name="broker-a")
    with standalone(tmp_path_factory.mktemp("top"), broker=settings) as address:
        assert rmq("send", "Busy", "a", "b", "c", "-n", address).returncode == 0
        yield address


@pytest.fixture
def _at_once(monkeypatch):
    """Looks follow each other without a pause."""

    async def no_pause(seconds):
        await asyncio.sleep(0)

    monkeypatch.setattr("rmqkit.cli.admin.top._pause", no_pause)


@pytest.mark.usefixtures("_at_once")
def test_one_report_as_text_and_as_json(namesrv):
    told = rmq("top", "--once", "-n", namesrv)
    assert (told.returncode, told.stderr) == (0, "")
    assert told.stdout.startswith("rmq top · ") and "\nBusy " in told.stdout and "TBW102" not in told.stdout
    report = json.loads(rmq("top", "--once", "--json", "--system", "-n", namesrv).stdout)
    stored = {row["topic"]: row["stored"] for row in report["topics"]}
    assert stored["Busy"] == 3 and "SCHEDULE_TOPIC_XXXX" in stored
    assert [row["brokerName"] for row in report["brokers"]] == ["broker-a"]


def test_without_a_name_server_it_ends_with_the_reason():
    told = rmq("top", "--once", "-n", "127.0.0.1:1")
    assert told.returncode == 3 and told.stderr.startswith("rmq: ")


def test_on_a_terminal_keys_sort_and_q_quits(namesrv):
    ours, terminal = os.openpty()
    termios.tcsetwinsize(terminal, (24, 80))
    command = [RMQ, "top", "--interval", "0.1", "-n", namesrv]
    with subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal) as process:
        os.close(terminal)
        shown = read_until(ours, b"by lag")
        assert b"Busy" in read_until(ours, b"Busy") or b"Busy" in shown
        os.write(ours, b"n")
        read_until(ours, b"by name")
        os.write(ours, b"q")
        read_until(ours, None)
    os.close(ours)
    assert process.returncode == 0


def read_until(terminal, wanted):
    """Return the output of a terminal up to a text, or all of it."""
    shown = b""
    while wanted is None or wanted not in shown:
        try:
            shown += os.read(terminal, 1 << 16)
        except OSError:  # the other side is closed
            assert wanted is None, shown
            break
    return shown

"""The programs in ``examples/`` do what they say."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rmqkit import Message, sync
from tests.interop.standalone import run_standalone

EXAMPLES = Path(__file__).parents[2] / "examples"
SECONDS_MAX = 200
ROOT = EXAMPLES.parent
CONF = "transactionCheckInterval=1000\ntransactionTimeOut=4000\n"
"""A decision that is later than the time-out is asked about, and the example says so."""

PATIENT = """
import runpy, sys
from tests import patience
patience.be_patient()
del sys.argv[0]
sys.path[0] = sys.argv[0].rpartition("/")[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs a program whose sends are not tried again after 3 s, as what it prints has no message twice."""

PRINTS = {
    "hello.py": r"""sent: SEND_OK
received hello, world""",
    "ordered.py": "\n".join(f"order {order}: created, paid, packed, shipped" for order in range(5)),
    "worker_pool.py": "200 jobs by 8 workers",
    "fastapi_service.py": r"""\["book","lamp"]""",
    "django_site.py": r"""SEND_OK
SEND_OK""",
    "transactions.py": r"""order of 1: COMMIT
order of 0: rolled back, CHECK constraint failed: amount > 0
order of 0: ROLLBACK
order of 3: UNKNOWN
asked about an order: \(3,\)
shipped: 1 3""",
    "delay.py": r"""(.* after \d+ s\n?){3}""",
    "request_reply.py": r"""apples cost 3
pears cost 4
the request for topic Prices was stored, and no reply came within 300 ms: .*""",
    "batch.py": r"""10000 messages in 4 queues
in order: True
1 of 2 messages not sent, .* Counter\({'SendResult': 1, 'MessageIllegal': 1}\)""",
    "pop.py": r"""popped: by hand
jobs done: 100
done again: \['7'\]""",
    "typed_bodies.py": r"""admitted: seat='12A' price=90\.0
turned away: the body is not a valid Ticket: seat: String should match pattern .*; price: Input .* greater than 0""",
    "idempotent.py": r"""stored: 3 messages, 2 with the same id
booked: \[\('alice', 100\), \('bob', 50\)\]""",
    "celery_tasks.py": r"""3 \+ 4 = 7
later: 7 \* 6 = 42""",
    "faststream_service.py": r"""billed: order, 17
shipped: order 17 for 40\.0""",
    "traced.py": r"""spans: checkout, process Checkouts, send Checkouts, write the bill
one trace: True""",
    "tracing.py": r"""child span: send Bills
root span: checkout
child span: write the bill
child span: process Bills
trace topic: PublishTrace shop
trace topic: SubscribeBeforeTrace billing
trace topic: SubscribeAfterTrace billing""",
}


@pytest.fixture(scope="module")
def namesrv(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    work_dir = tmp_path_factory.mktemp("examples")
    conf = work_dir / "broker.conf"
    conf.write_text(CONF)
    with run_standalone(work_dir / "store", work_dir, "--config", str(conf)) as running:
        yield running.namesrv_addr
        running.stop()


def test_every_example_is_run():
    others = {"demo.py", "service.py"}  # `make demo`, for people to watch; the other has a test of its own
    assert {path.name for path in EXAMPLES.glob("*.py")} - others <= PRINTS.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", PRINTS)
def test_an_example_prints_what_it_is_for(namesrv, name):
    command = [sys.executable, "-c", PATIENT, str(EXAMPLES / name), namesrv]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS_MAX, check=False)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(PRINTS[name], done.stdout.strip()), done.stdout


def test_the_service_finishes_what_it_does_when_it_is_asked_to_end(namesrv):
    with sync.Producer("shop", namesrv) as producer:
        producer.send(Message(topic="Orders", body=b"17"))
    command = [sys.executable, "-c", PATIENT, str(EXAMPLES / "service.py"), namesrv]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        assert "billed order 17\n" in iter(process.stdout.readline, "")
        process.send_signal(signal.SIGTERM)
        rest, _ = process.communicate(timeout=SECONDS_MAX)
    assert process.returncode == 0
    assert rest.splitlines()[-1] == "closed"

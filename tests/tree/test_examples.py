"""The programs in ``examples/`` work as described."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from rmqkit import Message, sync
from tests.interop.standalone import run_standalone
from tests.ports import free_port

EXAMPLES = Path(__file__).parents[2] / "examples"
SECONDS_MAX = 200
ROOT = EXAMPLES.parent
CONF = "transactionCheckInterval=1000\ntransactionTimeOut=4000\n"
"""The broker checks a transaction whose decision comes after the time-out, and the example reports that."""

PATIENT = """
import runpy, sys
from tests import patience
patience.be_patient()
del sys.argv[0]
sys.path[0] = sys.argv[0].rpartition("/")[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""A program that runs an example without retries of sends after 3 s, because its output shows no duplicate messages."""

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
turned away: the body is not of type Ticket: seat: String should match pattern .*; price: Input .* greater than 0""",
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
    others = {"demo.py", "service.py", "sse_chat.py"}  # `make demo` is for people to watch; the others have own tests
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


class Chat:
    """The example `sse_chat.py` as a process, on a port of its own."""

    def __init__(self, folder: Path) -> None:
        self._port = free_port()
        where = ["--app-dir", str(EXAMPLES), "--port", str(self._port)]
        command = [sys.executable, "-m", "uvicorn", *where, "sse_chat:app"]
        self.process = subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        assert any("Uvicorn running" in line for line in self.process.stderr), "the service starts"

    def request(self, path: str, method: str = "GET", **headers: str) -> urllib.request.Request:
        return urllib.request.Request(f"http://127.0.0.1:{self._port}{path}", headers=headers, method=method)

    def ask(self) -> None:
        with urllib.request.urlopen(self.request("/answers/42", "POST"), timeout=SECONDS_MAX) as answer:
            assert answer.status == 200

    def words(self, count: int, **headers: str) -> list[tuple[str, str]]:
        """Return ids and words of up to ``count`` events of an answer."""
        found: list[tuple[str, str]] = []
        with urllib.request.urlopen(self.request("/answers/42", **headers), timeout=SECONDS_MAX) as answer:
            event_id = ""
            for raw in answer:
                name, _, value = raw.decode().rstrip("\n").partition(": ")
                if name == "id":
                    event_id = value
                elif name == "data":
                    found.append((event_id, value))
                if len(found) == count:
                    break
        return found

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.mark.slow
def test_a_browser_misses_no_word_when_the_service_is_killed_and_starts_on_another_port(tmp_path):
    chat = Chat(tmp_path)
    try:
        chat.ask()
        words = chat.words(100)
        first = words[:3]
        assert [event_id for event_id, _ in words] == [f"1.{i}.42" for i in range(len(words))]
        with urllib.request.urlopen(chat.request("/"), timeout=SECONDS_MAX) as page:
            assert b"EventSource" in page.read()
        chat.kill()
        chat = Chat(tmp_path)
        rest = chat.words(100, **{"Last-Event-ID": first[-1][0]})
        with urllib.request.urlopen(chat.request("/answers/42", **{"Last-Event-ID": words[-1][0]})) as answer:
            assert answer.status == 204
    finally:
        chat.kill()
    assert first + rest == words
    assert "".join(word for _, word in words).strip() == "Streams outlive the connection that reads them"


@pytest.mark.slow
def test_the_chat_stops_while_a_browser_waits_for_more_words(tmp_path):
    chat = Chat(tmp_path)
    try:
        with urllib.request.urlopen(chat.request("/answers/43"), timeout=SECONDS_MAX) as answer:
            assert answer.readline() == b"retry: 2000\n"
            chat.process.terminate()
            assert answer.read() == b"\n", "the response is complete"
        _, log = chat.process.communicate(timeout=SECONDS_MAX)
    finally:
        chat.kill()
    assert "Traceback" not in log and "ERROR" not in log


def test_the_readme_shows_a_part_of_the_example():
    readme, example = (ROOT / "README.md").read_text(), (EXAMPLES / "sse_chat.py").read_text()
    (shown,) = (
        block for block in re.findall(r"```python\n(.*?)```", readme, re.DOTALL) if "EventStreamResponse" in block
    )
    lines = iter(example.splitlines())
    for line in filter(None, shown.splitlines()):
        assert line in lines, f"examples/sse_chat.py does not have this line, or not here: {line}"
    assert len(example.splitlines()) <= 60

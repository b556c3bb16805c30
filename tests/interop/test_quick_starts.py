"""The quick-starts of FastStream, Celery, kombu and OpenTelemetry, with our broker and with Apache's.

Each program is the framework's own: from the README of its installed release, or from the page named with it. It runs
unchanged in separate processes, except for the class or the URL of the broker.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import metadata
from pathlib import Path

import pytest

from rmqkit import Message, sync
from tests.interop.server_process import ServerProcess
from tests.patience import producing, pulling

SECONDS_MAX = 200
BIN = Path(sys.executable).parent


@pytest.fixture(params=["ours", "Apache's"])
def address(request: pytest.FixtureRequest) -> str:
    """Return the name server of a cluster."""
    if request.param == "ours":
        return request.getfixturevalue("standalone").namesrv_addr
    return request.getfixturevalue("apache").namesrv_addr


def each_at_one(*cases: object) -> pytest.MarkDecorator:
    """Parametrize two cases, the first with our broker, the second with Apache's: they differ in the framework's part
    only.
    """
    where = ["ours", "Apache's"]
    placed = list(zip(cases, where, strict=True))
    return pytest.mark.parametrize(("case", "address"), placed, indirect=["address"], ids=where)


def printed(package: str, word: str) -> str:
    """Return the first Python block of a package's README that contains a word."""
    readme = str(metadata(package).get_payload())
    fenced = re.findall(r"^```python\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    indented = re.findall(r"^ *\.\. code(?:-block)?:: python\n((?:\s*\n| +.*\n)+)", readme, re.MULTILINE)
    return next(text for text in (*fenced, *map(textwrap.dedent, indented)) if word in text)


def changed(program: str, changes: Mapping[str, str]) -> str:
    """Return a program with replaced texts. Each old text must occur once."""
    for text, other in changes.items():
        assert program.count(text) == 1, f"{text!r} in\n{program}"
        program = program.replace(text, other)
    return program


@contextmanager
def running(folder: Path, *command: str | Path) -> Iterator[ServerProcess]:
    """Run a program with a folder as its working directory."""
    program = [sys.executable, "-c", "import os, sys; os.chdir(sys.argv[1]); os.execv(sys.argv[2], sys.argv[2:])"]
    with ServerProcess([*program, folder, *command], folder / "output", {**os.environ, "PYTHONUNBUFFERED": "1"}) as one:
        yield one


def output_of(folder: Path, *command: str | Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=SECONDS_MAX)
    assert done.returncode == 0, done.stderr
    return done.stdout


@each_at_one("user_id: int", "PositiveInt")
def test_faststream(case: str, address: str, tmp_path: Path) -> None:
    """README, "Writing app code" and "Pydantic serialization"."""
    changes = {
        "\nfrom faststream.kafka import KafkaBroker": "\nfrom rmqkit.faststream import RocketBroker",
        'KafkaBroker("localhost:9092")': f'RocketBroker("{address}")',
    }
    (tmp_path / "basic.py").write_text(changed(printed("faststream", case), changes))
    with sync.Producer("quick-start", address, settings=producing()) as producer:
        producer.send(Message(topic="in", body=json.dumps({"user": "John", "user_id": 1}).encode()))
    with running(tmp_path, BIN / "faststream", "run", "basic:app") as app:
        app.wait_ready("FastStream app started successfully", SECONDS_MAX)
        app.wait_ready(r"in .*Processed", SECONDS_MAX)
        assert app.stop(signal.SIGTERM, SECONDS_MAX) == 0, app.log_tail()
    with sync.PullConsumer("quick-start-reader", address, settings=pulling()) as reader:
        pulled = [reader.pull(queue, 0) for queue in reader.queues("out")]
    stored = [message.body.decode() for one in pulled for message in one.messages]
    assert stored in (["User: John - 1 registered"], ["User: 1 - John registered"])


FIRST_STEPS = """
from celery import Celery

app = Celery('tasks', broker='pyamqp://guest@localhost//')

@app.task
def add(x, y):
    return x + y
"""
"""``tasks.py`` of docs.celeryq.dev, "First Steps with Celery"."""


def test_celery(address: str, tmp_path: Path) -> None:
    """A call from Python, and a worker that executes it."""
    url = f"rocketmq://{address}//"
    (tmp_path / "tasks.py").write_text(changed(FIRST_STEPS, {"pyamqp://guest@localhost//": url}))
    call = "from tasks import add; result = add.delay(4, 4); print(result.id)"
    task_id = output_of(tmp_path, sys.executable, "-c", call).strip()
    with running(tmp_path, BIN / "celery", "-A", "tasks", "worker", "--loglevel=INFO") as worker:
        worker.wait_ready(rf"Task tasks.add\[{task_id}\] succeeded in \S+: 8$", SECONDS_MAX)
        assert worker.stop(signal.SIGTERM, SECONDS_MAX) == 0, worker.log_tail()


def test_kombu(address: str, tmp_path: Path) -> None:
    """README, "Quick overview". Its second half is left out, because it uses undefined names."""
    program, _, _ = printed("kombu", "video_queue").partition("# Consume from several queues")
    program = changed(program, {"amqp://guest:guest@localhost//": f"rocketmq://{address}//"})
    (tmp_path / "overview.py").write_text(f"import rmqkit.kombu\n{program}")
    with running(tmp_path, sys.executable, "overview.py") as overview:
        overview.wait_ready(r"^\{'name': '/tmp/lolcat1.avi', 'size': 1301013\}$", SECONDS_MAX)


CLIENTS = """
import threading

from rmqkit import Message, PushConsumerSettings, StartFrom, sync

# report a span of a producer with the default settings
with sync.Producer("my-group", "{address}") as producer:
    producer.send(Message(topic="my-topic", body=b"raw_bytes"))

# report a span of a consumer with the default settings
settings = PushConsumerSettings(start_from=StartFrom.FIRST_OFFSET)
consumer = sync.PushConsumer("my-group", "{address}", settings=settings)
processed = threading.Event()

@consumer.on("my-topic")
def process(message):
    processed.set()

with consumer:
    processed.wait()
"""
"""Creates a producer and a consumer, as in the usage of the instrumentors in opentelemetry-python-contrib."""

BY_CODE = """
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter

from rmqkit.client.observe.instrumentor import RmqkitInstrumentor

provider = TracerProvider()
processor = BatchSpanProcessor(ConsoleSpanExporter())
provider.add_span_processor(processor)

# Sets the global default tracer provider
trace.set_tracer_provider(provider)

# Instrument rmqkit
RmqkitInstrumentor().instrument()
"""
"""The form of opentelemetry.io for Python, "Instrumentation", and the instrumentors."""

BY_COMMAND = [BIN / "opentelemetry-instrument", *(f"--{one}_exporter=console" for one in ("traces", "metrics", "logs"))]


@each_at_one((BY_COMMAND, CLIENTS), ([], BY_CODE + CLIENTS))
def test_opentelemetry(case: tuple[list[str | Path], str], address: str, tmp_path: Path) -> None:
    """``opentelemetry-instrument python program.py``, and an instrumentor that the program calls."""
    command, program = case
    (tmp_path / "program.py").write_text(program.replace("{address}", address))
    printed = output_of(tmp_path, *command, sys.executable, "program.py")
    found = re.findall(r"^\{\n    \"name\".*?^\}", printed, re.MULTILINE | re.DOTALL)
    spans = {span["name"]: span for span in map(json.loads, found)}
    assert {name: span["kind"] for name, span in spans.items()} == {
        "send my-topic": "SpanKind.PRODUCER",
        "process my-topic": "SpanKind.CONSUMER",
    }
    assert len({span["context"]["trace_id"] for span in spans.values()}) == 1

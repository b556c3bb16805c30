"""Celery tasks over RocketMQ, with a worker in the same process: ``python examples/celery_tasks.py [HOST:PORT]``.

As a service the worker is run with ``celery -A celery_tasks worker``.
"""

from __future__ import annotations

import logging
import os
import sys
import threading

from celery import Celery
from celery.contrib.testing.worker import start_worker

NAME_SERVER = sys.argv[1] if len(sys.argv) > 1 and __name__ == "__main__" else os.environ.get("NAMESRV_ADDR")

app = Celery("sums", broker=f"rocketmq://{NAME_SERVER or '127.0.0.1:9876'}//")
app.conf.update(task_ignore_result=True, task_default_queue="sums", worker_hijack_root_logger=False)
done = threading.Event()


@app.task
def add(a: int, b: int) -> None:
    print(f"{a} + {b} = {a + b}")
    multiply.apply_async((a + b, 6), countdown=1)  # the broker keeps it meanwhile


@app.task
def multiply(a: int, b: int) -> None:
    print(f"later: {a} * {b} = {a * b}")
    done.set()


if __name__ == "__main__":
    logging.disable()
    add.delay(3, 4)
    with start_worker(app, perform_ping_check=False, pool="solo"):
        done.wait()

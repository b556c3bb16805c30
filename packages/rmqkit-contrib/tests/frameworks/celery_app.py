"""The application of the tests of Celery: nothing in it is of rmqkit but the URL."""

from __future__ import annotations

import os
import signal

from celery import Celery

app = Celery("shop", broker=os.environ["BROKER_URL"])
app.conf.update(
    task_acks_late=True,
    task_ignore_result=True,
    broker_connection_retry_on_startup=True,
    worker_prefetch_multiplier=1,
    broker_transport_options={"visibility_timeout": float(os.environ.get("VISIBILITY", "3600"))},
)


@app.task
def bill(order: int) -> None:
    print(f"billed {order}")
    ship.apply_async((order,), countdown=1)


@app.task
def ship(order: int) -> None:
    print(f"shipped {order}")


@app.task(bind=True, max_retries=3)
def flaky(self, order: int) -> None:
    print(f"try {self.request.retries} of {order}")
    if self.request.retries < 2:
        raise self.retry(countdown=0)


@app.task
def deadly(order: int) -> None:
    if "DEADLY" in os.environ:
        os.kill(os.getppid(), signal.SIGKILL)  # the worker; then the process of its pool that this is
        os.kill(os.getpid(), signal.SIGKILL)
    print(f"survived {order}")

"""The common part of ``rmq send``, ``rmq tail`` and ``rmq replay``: options, a connection, a clean stop, counters."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Self, TypeVar

from rmqkit.cli.frame.nouns import LOCAL, admin_of, drop_output, silence, tls_settings
from rmqkit.clock import SYSTEM_CLOCK
from rmqkit.errors import RmqError, UnknownName

if TYPE_CHECKING:
    from rich.progress import Progress

    from rmqkit.admin.messages.sending import Stop
    from rmqkit.client.runtime.runtime import ClientRuntime
    from rmqkit.client.runtime.settings import ClientSettings, ProducerSettings

_ROUTE_INTERVAL_MS = 2000

C = TypeVar("C", bound="ClientSettings")


def note(text: str) -> None:
    """Print a line on stderr for the user."""
    print(f"rmq: {text}", file=sys.stderr, flush=True)


def note_wait(who: str, up_to_ms: int) -> None:
    """Print the reason for a wait on stderr."""
    note(f"waiting for {who}, up to {up_to_ms / 1000:g} s")


def run(work: Callable[[Stop], Coroutine[Any, Any, None]]) -> bool:
    """Run a command's work. Return False if Ctrl-C, SIGTERM, or the reader of its output stopped the work.

    Raises RmqError: the work has failed, or a file cannot be read or written.
    """
    from rmqkit.admin.messages.sending import Stop

    async def main() -> bool:
        stop = Stop()
        _on_signals(stop.ask)
        try:
            await work(stop)
        except asyncio.CancelledError:
            if not stop.is_asked:
                raise
            return False
        return True

    silence()
    try:
        return asyncio.run(main())
    except BrokenPipeError:
        drop_output()
        return False
    except OSError as error:
        raise RmqError(f"cannot read or write {error.filename or 'a file or the output'}: {error.strerror}") from None


def _on_signals(ask: Callable[[], object]) -> None:
    """Call a function on the running loop at SIGINT and SIGTERM, also on Windows, whose loops do not support
    signals."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        try:
            loop.add_signal_handler(number, ask)
        except NotImplementedError:
            signal.signal(number, lambda *_: loop.call_soon_threadsafe(ask))


def client_settings(kind: type[C], options: Mapping[str, Any], **more: Any) -> C:
    """Return the settings of a client with the connection of the common options."""
    from rmqkit.remoting.authentication import Credentials

    user, secret, token = (options.get(name) or "" for name in ("access_key", "secret_key", "security_token"))
    auth = Credentials(user, secret, token or None) if user else None
    return kind(
        tls=tls_settings(options),
        auth=auth,
        api_timeout_ms=options["timeout_ms"],
        route_interval_ms=_ROUTE_INTERVAL_MS,
        **more,
    )


def sending_settings(options: Mapping[str, Any], *, message_bytes_max: int) -> ProducerSettings:
    """Return the settings of a producer that retries during the restart of a broker. The common option ``--timeout`` is
    the limit for one try."""
    from rmqkit.client.runtime.settings import ProducerSettings, SendLimits

    timeout_ms = options["timeout_ms"]
    budget_ms = max(ProducerSettings().send_timeout_ms, timeout_ms)
    return client_settings(
        ProducerSettings,
        options,
        send_timeout_ms=budget_ms,
        try_timeout_ms=timeout_ms,
        limits=SendLimits(message_bytes_max=message_bytes_max),
    )


@asynccontextmanager
async def runtime_for(
    topic: str | None, options: Mapping[str, Any], *, must_exist: bool = True
) -> AsyncIterator[ClientRuntime]:
    """Yield the connections of a command, after a check that a name server answers and knows the topic.
    Raises UnknownName: the topic must exist and does not. Raises RmqError: no name server answers."""
    from rmqkit.client.runtime.runtime import ClientRuntime
    from rmqkit.client.runtime.settings import ClientSettings

    async with admin_of(options) as admin:
        try:
            await (admin.calls.topic_names() if topic is None else admin.calls.route(topic))
        except UnknownName:
            if must_exist:
                raise
    runtime = ClientRuntime(options["name_servers"] or LOCAL, settings=client_settings(ClientSettings, options))
    await runtime.start()
    try:
        yield runtime
    finally:
        await runtime.close()


class Tally:
    """A counter of messages with a progress bar on a terminal's stderr; a context manager.

    Args:
        verb: the action, such as ``sending``.
        total: the expected number of messages, if it is known.
        is_shown: True if a bar is allowed.
    """

    def __init__(self, verb: str, total: int | None, *, is_shown: bool) -> None:
        self.sent = self.failed = 0
        self.first_failure: RmqError | None = None
        self._verb, self.total = verb, total
        self._bar: Progress | None = None
        self._is_shown = is_shown and sys.stderr.isatty()
        self._started_ms = SYSTEM_CLOCK.monotonic_ms()

    def __enter__(self) -> Self:
        self._started_ms = SYSTEM_CLOCK.monotonic_ms()
        if self._is_shown:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn

            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[counts]}"))
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=False)
            self._bar.add_task(self._verb, total=self.total, counts="")
            self._bar.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def add(self, sent: int, failures: list[RmqError]) -> None:
        """Count sent messages and failures."""
        self.sent += sent
        self.failed += len(failures)
        self.first_failure = self.first_failure or next(iter(failures), None)
        if self._bar is not None:
            of = "" if self.total is None else f" of {self.total:,}"
            failed = f", {self.failed:,} failed" if self.failed else ""
            counts = f"{self.sent:,}{of}, {self.rate:,.0f}/s{failed}"
            self._bar.update(self._bar.task_ids[0], completed=self.sent + self.failed, counts=counts)

    @property
    def seconds(self) -> float:
        return max(0.001, (SYSTEM_CLOCK.monotonic_ms() - self._started_ms) / 1000)

    @property
    def rate(self) -> float:
        """Return messages per second."""
        return self.sent / self.seconds

    def line(self, where: str, *, has_cause: bool = True) -> str:
        """Return a summary in one line; ``has_cause``: include the text of the first failure."""
        cause = f", the first because: {self.first_failure}" if has_cause else ""
        failed = f"; {self.failed:,} failed{cause}" if self.failed else ""
        return f"sent {self.sent:,} to {where} in {self.seconds:.2f} s, {self.rate:,.0f}/s{failed}"

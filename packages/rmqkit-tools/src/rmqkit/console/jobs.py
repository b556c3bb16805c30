"""Jobs: replays of dead letters that run in the console and continue after a restart or a crash.

============================  =======================================================================================
file in the folder            content
============================  =======================================================================================
``<id>.json``                 the job, its user, and its total progress (`Job`)
``<id>.state.json``           the progress in each queue (`rmqkit.admin.replay.state.State`), saved after each chunk
``<id>.audit.jsonl``          a line for each message: its source, and its target or the reason of a refusal
``<id>.lock``                 the lock of the console that runs the job, so that no other console sends its messages
``<group>-….replayed.json``   the dead letters of a group that jobs have sent (`rmqkit.admin.replay.memory.Memory`)
============================  =======================================================================================

A killed console may have sent messages of a chunk that is not in the state. The next console looks up these messages in
their target before it sends them, so no message is lost or stored twice (`rmqkit.admin.replay.replay`). A job continues
automatically if the console's own user signs its requests. A job of a cluster's user waits until a user resumes the
job, because the secret was only in memory.

Without a target, a job sends dead letters only to their own group. A job without ``again`` skips the messages of
earlier jobs. At most one replay of a group and `JOBS_MAX` replays in total run at a time. Use this module only on the
event loop.
"""

from __future__ import annotations

import asyncio
import enum
import fcntl
import io
import logging
import secrets
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from msgspec import Struct, field, to_builtins

from rmqkit.admin import Admin
from rmqkit.admin.messages.sending import Stop
from rmqkit.admin.replay.memory import Memory, file_name
from rmqkit.admin.replay.replay import Plan, Replay, opened
from rmqkit.admin.replay.selection import Selection
from rmqkit.admin.replay.state import State
from rmqkit.client.runtime.runtime import ClientRuntime
from rmqkit.client.runtime.settings import ClientSettings, ProducerSettings, PullConsumerSettings
from rmqkit.errors import RmqError, SettingsError
from rmqkit.protocol.names import dlq_topic
from rmqkit.remoting.authentication import Credentials
from rmqkit.remoting.tls import ClientTls
from rmqkit.sentences import _, plain
from rmqkit.store.files import JsonFile

__all__ = ["JOBS_MAX", "Job", "Jobs", "Progress", "Status"]

JOBS_MAX, JOBS_KEPT = 4, 200
_log = logging.getLogger(__name__)


class Status(enum.StrEnum):
    """The state of a job."""

    RUNNING = "running"
    PAUSED = "paused"
    DONE = "done"
    FAILED = "failed"


class Job(Struct, rename="camel", kw_only=True):
    """A replay of dead letters.

    Attributes:
        name_servers: the name servers of the cluster. The same name with other name servers is another cluster.
        user: the user who created the job.
        is_own: True if the console's own user signs the requests of the job.
        target: the topic to send to; empty: a retry topic of the group, which no other group reads.
        again: True to send the messages of earlier jobs again.
        rate: the maximum of messages per second.
        expected: the number of messages that the dry run counted.
        why: the error of a failed job.
        found: the number of messages that were already in the target and were not sent again.
    """

    id: str
    env: str
    name_servers: str
    user: str
    is_own: bool
    group: str
    target: str = ""
    again: bool = False
    by: str = "kind"
    kinds: list[str] = field(default_factory=list)
    begin_ms: int = 0
    end_ms: int | None = None
    rate: float = 100.0
    expected: int = 0
    created_ms: int = 0
    status: Status = Status.RUNNING
    why: str = ""
    found: int = 0

    @property
    def selection(self) -> Selection:
        """The selection of the job's messages."""
        topic, kinds = dlq_topic(self.group), tuple(self.kinds)
        return Selection(topic, self.begin_ms, self.end_ms, by=self.by, kinds=kinds)


class Progress(Struct, rename="camel", kw_only=True):
    """The progress of a job: the numbers of sent, refused and (``left``) unexamined messages. ``left`` is None before
    the job has begun. ``is_here`` is True while this console runs the job."""

    sent: int = 0
    failed: int = 0
    left: int | None = None
    is_here: bool = False


class _Run(Struct):
    task: asyncio.Task[None]
    lock: io.IOBase
    stop: Stop | None = None
    replay: Replay | None = None
    is_paused: bool = False
    is_ended: bool = False

    def end(self) -> None:
        """Stop the run after its current chunk, or before its start."""
        self.is_ended = True
        if self.stop is not None:
            self.stop.ask()


class Jobs:
    """The jobs in a folder. At the end of a run, ``report`` is called for the audit with job, outcome and detail.

    Raises SettingsError: the folder cannot be used."""

    def __init__(
        self,
        folder: Path | None,
        *,
        credentials: Credentials | None,
        tls: ClientTls | None,
        report: Callable[[Job, str, str], None],
    ) -> None:
        self._folder = folder
        self._credentials, self._tls, self._report = credentials, tls, report
        self._runs: dict[str, _Run] = {}
        self._jobs: dict[str, Job] = {}
        if folder is not None:
            try:
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            except OSError as error:
                raise SettingsError(
                    _(
                        "folder of jobs {folder}: {strerror}: name another with --jobs",
                        folder=folder,
                        strerror=error.strerror,
                    )
                ) from None

    # -- reading

    def all(self) -> list[Job]:
        """Return every job, the newest first. Read the files of jobs that other consoles run again."""
        for path in self._folder.glob("*.json") if self._folder is not None else ():
            name = path.name.removesuffix(".json")
            known = self._jobs.get(name)
            is_others = name not in self._runs and (known is None or known.status is Status.RUNNING)
            if is_others and "." not in name and (job := self._load(path)) is not None:
                self._jobs[name] = job
        return sorted(self._jobs.values(), key=lambda job: (-job.created_ms, job.id))

    def find(self, name: str) -> Job | None:
        """Return the job with an id; None if there is no such job."""
        return next((job for job in self.all() if job.id == name), None)

    def progress(self, job: Job) -> Progress:
        """Return the progress of a job."""
        run = self._runs.get(job.id)
        is_here = run is not None and not run.task.done()
        try:
            state = run.replay.state if run is not None and run.replay is not None else self._state(job)
        except SettingsError:
            state = None
        if state is None:
            return Progress(is_here=is_here)
        return Progress(sent=state.sent, failed=state.failed, left=state.left, is_here=is_here)

    def audit_path(self, job: Job) -> Path | None:
        """Return the path of the audit of a job; None if the file does not exist."""
        path = self._path(job, ".audit.jsonl")
        return path if path.exists() else None

    def memory(self, job: Job) -> Memory:
        """Return the dead letters that earlier jobs have sent from the same group to the same target.
        Raises SettingsError: the file is not a memory of this replay."""
        task = _memory_task(job)
        return Memory.new(task) if self._folder is None else Memory.load(self._memory_path(job), task)

    # -- changing

    def begin(self, job: Job, credentials: Credentials | None) -> Job:
        """Start a job. Raises SettingsError: the group has a running job, too many jobs run, or there is no folder."""
        if self._folder is None:
            why = _("this console keeps no jobs: start it with --jobs DIR, so that a replay can be resumed")
            raise SettingsError(why)
        job.id = f"replay-{secrets.token_hex(5)}"
        self._check(job)
        for old in self.all()[JOBS_KEPT:]:
            if old.status is Status.DONE:
                for path in self._folder.glob(f"{old.id}.*"):
                    path.unlink()
                del self._jobs[old.id]
        self._spawn(job, credentials)
        return job

    def pause(self, job: Job) -> None:
        """Stop a job after its current chunk. Raises SettingsError: this console does not run the job."""
        run = self._runs.get(job.id)
        if run is None or run.task.done():
            raise SettingsError(_("{id} does not run in this console", id=job.id))
        run.is_paused = True
        run.end()

    def resume(self, job: Job, credentials: Credentials | None) -> None:
        """Continue a job. Raises SettingsError: the job is done or running, or too many jobs run."""
        if job.status is Status.DONE:
            raise SettingsError(_("{id} is done", id=job.id))
        self._check(job)
        self._spawn(job, credentials)

    def resume_own(self, envs: dict[str, str]) -> None:
        """Continue unfinished jobs of the console's own user. ``envs`` has the name servers of each cluster."""
        for job in reversed(self.all()):
            # Skip jobs of a cluster's users: their secrets were only in the memory of the stopped console.
            if job.status is Status.RUNNING and job.is_own and envs.get(job.env) == job.name_servers:
                try:
                    self._check(job)
                    self._spawn(job, None)
                except SettingsError as error:
                    _log.warning("console: %s is not resumed: %s", job.id, error)

    async def close(self) -> None:
        """Stop all jobs after their current chunk. The next console continues them."""
        for run in self._runs.values():
            run.end()
        await asyncio.gather(*(run.task for run in self._runs.values()), return_exceptions=True)

    # -- inside

    def _check(self, job: Job) -> None:
        running = [one for one in self.all() if (run := self._runs.get(one.id)) and not run.task.done()]
        if any(one.env == job.env and one.group == job.group for one in running):
            raise SettingsError(_("a replay of {group} runs already: one at a time", group=job.group))
        if len(running) >= JOBS_MAX:
            raise SettingsError(_("{most} replays run already: wait for one, or pause it", most=JOBS_MAX))

    def _spawn(self, job: Job, credentials: Credentials | None) -> None:
        # Lock before the first write, because the job may be running in another console.
        lock = open(self._path(job, ".lock"), "wb")  # noqa: SIM115 - closed when the job ends
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            raise SettingsError(_("{id} runs in another console on this machine", id=job.id)) from None
        job.status, job.why = Status.RUNNING, ""
        self._save(job)
        self._jobs[job.id] = job
        signing = credentials or self._credentials
        self._runs[job.id] = _Run(asyncio.create_task(self._run(job, signing), name=job.id), lock)

    async def _run(self, job: Job, credentials: Credentials | None) -> None:
        run = self._runs[job.id]
        run.stop = Stop()
        if run.is_ended:
            run.stop.ask()
        try:
            await self._replay(job, run, run.stop, credentials)
            job.status = Status.DONE
        except asyncio.CancelledError:
            if not run.stop.is_asked:
                raise
            # The status of a job that was not paused stays RUNNING, so that the next console continues the job.
            if run.is_paused:
                job.status = Status.PAUSED
        except (RmqError, OSError) as error:
            job.status, job.why = Status.FAILED, str(error)
        except Exception as error:  # noqa: BLE001 - the outer edge of a task: the page says what is in the log
            _log.exception("console: %s failed", job.id)
            job.status, job.why = Status.FAILED, f"{type(error).__name__}: {error}"
        finally:
            if run.replay is not None:
                job.found += run.replay.found
            # Save before the unlock, because another console may then continue the job.
            self._save(job)
            run.lock.close()
        shown = self.progress(job)
        detail = _(
            "{id}: {sent:,} sent, {failed:,} not accepted{value}",
            id=job.id,
            sent=shown.sent,
            failed=shown.failed,
            value="; " + job.why if job.why else "",
        )
        outcome = "failed" if job.status is Status.FAILED else "done" if job.status is Status.DONE else "paused"
        self._report(job, outcome, detail)

    async def _replay(self, job: Job, run: _Run, stop: Stop, credentials: Credentials | None) -> None:
        options = self._options(credentials)
        plan = Plan(
            task=job.id, selection=job.selection, group=job.group, target=job.target or None,
            memory=(self._memory_path(job), _memory_task(job)), is_again=job.again,
            state=self._path(job, ".state.json"), audit=self._path(job, ".audit.jsonl"), rate=job.rate,
        )  # fmt: skip
        async with AsyncExitStack() as stack:
            runtime = ClientRuntime(job.name_servers, settings=ClientSettings(**options))
            await runtime.start()
            stack.push_async_callback(runtime.close)
            admin = await stack.enter_async_context(Admin(job.name_servers, tls=self._tls, credentials=credentials))
            reading, sending = PullConsumerSettings(**options), ProducerSettings(**options)
            run.replay = await stack.enter_async_context(opened(plan, runtime, admin, reading=reading, sending=sending))
            await run.replay.run(stop)

    def _options(self, credentials: Credentials | None) -> dict[str, Any]:
        """Return the common settings of all clients of a job."""
        return {"tls": None if self._tls is None else self._tls.settings, "auth": credentials}

    def _path(self, job: Job, ending: str) -> Path:
        assert self._folder is not None, "a console with jobs has a folder"
        return self._folder / f"{job.id}{ending}"

    def _memory_path(self, job: Job) -> Path:
        assert self._folder is not None, "a console with jobs has a folder"
        # An id of a job has no dot, so this name never clashes with the file of a job.
        return self._folder / f"{file_name(job.name_servers, job.group, job.target)}.replayed.json"

    def _state(self, job: Job) -> State | None:
        return State.load(self._path(job, ".state.json"), job.id)

    def _save(self, job: Job) -> None:
        JsonFile(self._path(job, ".json"), mode=0o600).save(to_builtins(job, enc_hook=plain))

    def _load(self, path: Path) -> Job | None:
        try:
            return JsonFile(path).load(Job)
        except (RmqError, OSError) as error:
            _log.warning("console: %s is no job: %s", path, error)
            return None


def _memory_task(job: Job) -> str:
    return _("dead letters of {group}, to {target}", group=job.group, target=job.target or _("the group"))

"""Dead letters by kind, a dry run, and a replay that continues after a kill of its console: none lost, none twice."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path

import pytest

from rmqkit.admin import Admin
from rmqkit.admin.messages.listing import page
from rmqkit.admin.pulls import Span
from rmqkit.console import Console
from rmqkit.console.access.logins import Role, User
from rmqkit.console.jobs import Jobs, Status
from rmqkit.remoting.authentication import Credentials
from rmqkit.standalone import Standalone
from tests.admin.test_dead import KINDS, die
from tests.console.asgi import Browser, served
from tests.console.inside import task_of
from tests.console.test_changes import token_of
from tests.waiting import until

PATH = "/local/groups/billing/dead"
COUNT = 300
RETRY = "%RETRY%billing"
FORM = {"to": "", "again": "skip", "rate": "500", "begin": "", "end": ""}


async def prepare(admin: Admin, count: int = COUNT) -> None:
    await admin.groups.update("billing", {})
    await admin.topics.create(RETRY, read_queues=1, write_queues=1)
    for topic in ("Orders", "Emails"):
        await admin.topics.create(topic, read_queues=2, write_queues=2)
    await die(admin, "billing", count)


async def keys_in(admin: Admin, *topics: str) -> Counter[str]:
    """Return the number of copies of each message in some topics, by key."""
    found: Counter[str] = Counter()
    for topic in topics:
        found.update(one.keys[0] for one in (await page(admin.calls, topic, Span(), count=20_000)).messages)
    return found


async def begin(browser: Browser, form: dict[str, str]) -> str:
    """Begin a replay; its id."""
    token = token_of(await browser.post(PATH, form))
    done = await browser.post(PATH, {"review": token}, {"accept": "application/json"})
    again = await browser.post(PATH, {"review": token}, {"accept": "application/json"})
    assert done.json() == again.json()  # a second click begins no second job
    return str(done.json()["result"]["job"])


async def test_kinds_a_dry_run_and_a_replay_of_one_kind(tmp_path: Path) -> None:
    async with (
        served(tmp_path / "store", jobs=tmp_path / "jobs") as (both, console, browser),
        Admin(both.namesrv_address) as admin,
    ):
        await admin.groups.update("billing", {})
        assert "has no dead letters" in (await browser.get(PATH)).text
        assert (await browser.get("/local/groups/nobody/dead")).status == 200  # the part says who is unknown
        await prepare(admin, 30)
        shown = await browser.json(PATH)
        assert {one["kind"]: one["count"] for one in shown["found"]["kinds"]} == {kind: 10 for *_, kind in KINDS}
        assert "no user # of #" in (await browser.get(PATH)).text
        chosen = FORM | {f"kinds.{KINDS[0][2]}": "1", f"kinds.{KINDS[2][2]}": "1"}
        review = await browser.post(PATH, chosen, {"accept": "application/json"})
        rows = dict(review.json()["rows"])
        assert (rows["Messages"], rows[f"To {RETRY}"]) == ("20", "20")
        assert rows["Recipients"].startswith("only group billing; none of its clients is online")
        assert review.json()["requests"] == [f"SEND_MESSAGE_V2 (310) to {RETRY}: 20 messages"]
        assert not await keys_in(admin, RETRY)
        name = await begin(browser, chosen)
        await until(lambda: console.jobs.find(name).status is Status.DONE, "the job ends")
        assert await keys_in(admin, RETRY) == {f"k{n}": 1 for n in range(30) if n % 3 != 1}
        job = (await browser.json(f"/local/jobs/{name}"))["job"]
        assert (job["sent"], job["failed"], job["left"], job["expected"]) == (20, 0, 0, 20)
        lines = [json.loads(line) for line in (await browser.get(f"/local/jobs/{name}?download=1")).text.splitlines()]
        assert len({line["place"] for line in lines}) == 20
        assert name in (await browser.get("/local/jobs")).text
        outcomes = [one.outcome for one in console.audit.lines("replay dead letters")]
        assert outcomes == ["done", "done", "intent"]
        assert "20 sent" in console.audit.lines("replay dead letters")[0].detail
        # Dead letters stay where they are. The next replay skips what was sent, unless the user asks for a repeat.
        rest = (await browser.post(PATH, FORM, {"accept": "application/json"})).json()
        assert (rest["typed"], dict(rest["rows"])["Messages"]) == ("", "10")
        assert dict(rest["rows"])["Replayed before"] == "20: they are skipped"
        again = (await browser.post(PATH, FORM | {"again": "send again"}, {"accept": "application/json"})).json()
        assert (again["typed"], dict(again["rows"])["Messages"]) == ("billing", "30")
        assert again["warning"] == "dead letters that were replayed before are sent again"
        name = await begin(browser, FORM)
        await until(lambda: console.jobs.find(name).status is Status.DONE, "the job ends")
        assert await keys_in(admin, RETRY) == {f"k{n}": 1 for n in range(30)}


async def test_the_review_names_the_other_groups_of_the_target(tmp_path: Path) -> None:
    async with (
        served(tmp_path / "store", jobs=tmp_path / "jobs") as (both, _, browser),
        Admin(both.namesrv_address) as admin,
    ):
        await prepare(admin, 3)
        for group in ("billing", "shipping"):
            await admin.groups.update(group, {})
            await admin.offsets.reset(group, "Orders", 0)
        review = (await browser.post(PATH, FORM | {"to": "Orders"}, {"accept": "application/json"})).json()
        assert review["warning"] == "other groups read Orders and get the messages, too: shipping"
        assert (review["typed"], dict(review["rows"])["To Orders"]) == ("billing", "3")


async def test_a_replay_continues_after_its_console_was_killed(tmp_path: Path) -> None:
    async with Standalone(tmp_path / "store") as both, Admin(both.namesrv_address) as admin:
        await prepare(admin)
        folder = tmp_path / "jobs"
        first = Console(both.namesrv_address, jobs=folder)
        first.start()
        name = await begin(Browser(first), FORM)
        job = first.jobs.find(name)
        await until(lambda: first.jobs.progress(job).sent >= COUNT // 3, "a third is sent")
        state, (memory,) = (folder / f"{name}.state.json").read_bytes(), folder.glob("*.replayed.json")
        remembered = memory.read_bytes()
        await until(lambda: first.jobs.progress(job).sent >= COUNT // 2, "half is sent")
        task = task_of(first.jobs, name)
        task.cancel()  # as a kill does: nothing is tidied up
        await asyncio.gather(task, return_exceptions=True)
        await first.close()
        # What a kill leaves at the worst: messages were sent that neither the state nor the lines have.
        (folder / f"{name}.state.json").write_bytes(state)
        memory.write_bytes(remembered)
        lines = (folder / f"{name}.audit.jsonl").read_bytes().splitlines(keepends=True)
        sent = json.loads(state)["sent"]
        (folder / f"{name}.audit.jsonl").write_bytes(b"".join(lines[:sent]) + lines[sent][:20])
        assert len(lines) > sent
        assert (await keys_in(admin, RETRY)).total() > sent

        async with Console(both.namesrv_address, jobs=folder) as second:
            await until(lambda: second.jobs.find(name).status is Status.DONE, "it goes on and ends")
            shown = second.jobs.progress(second.jobs.find(name))
            assert (shown.sent, shown.failed, second.jobs.find(name).found) == (COUNT, 0, len(lines) - sent)
        assert await keys_in(admin, RETRY) == {f"k{n}": 1 for n in range(COUNT)}
        written = [json.loads(line) for line in (folder / f"{name}.audit.jsonl").read_text().splitlines()]
        assert Counter(line["place"] for line in written) == {line["place"]: 1 for line in written}
        assert len(written) == COUNT


async def test_pause_resume_and_who_may_run_what(tmp_path: Path) -> None:
    folder = tmp_path / "jobs"
    async with (
        served(tmp_path / "store", jobs=folder) as (both, console, browser),
        Admin(both.namesrv_address) as admin,
    ):
        await prepare(admin)
        name = await begin(browser, FORM | {"rate": "100"})
        twice = await browser.post(PATH, {"review": token_of(await browser.post(PATH, FORM))})
        assert twice.status in (200, 400, 409)
        await until(lambda: console.jobs.progress(console.jobs.find(name)).sent >= 20, "it sends")
        with pytest.raises(Exception, match="another console"):  # its lock: two consoles send nothing twice
            Jobs(folder, credentials=None, tls=None, report=lambda *_: None).resume(console.jobs.find(name), None)
        path = f"/local/jobs/{name}"
        assert (await browser.post(path, {"action": "burn"})).status == 400
        assert (await browser.post(path, {"action": "pause"})).status == 200
        await until(lambda: console.jobs.find(name).status is Status.PAUSED, "it pauses")
        assert console.jobs.progress(console.jobs.find(name)).sent < COUNT
        assert "Resume" in (await browser.get(path)).text
        await browser.post(path, {"review": token_of(await browser.post(path, {"action": "resume"}))})
        await until(lambda: console.jobs.find(name).status is Status.DONE, "it ends")
        assert await keys_in(admin, RETRY) == {f"k{n}": 1 for n in range(COUNT)}
        assert [one.action for one in console.audit.lines("done") if "pause" in one.action] == ["pause replay"]
        console.authorize = lambda _: User("vera", Role.VIEWER)
        assert (await browser.post(path, {"action": "pause"})).status == 403
        assert (await browser.post(PATH, FORM)).status == 403


UNUSABLE = [
    (FORM | {"rate": "0"}, "must be from 1 to"),
    (FORM | {"to": "Nowhere"}, "no topic"),
    (FORM | {"begin": "tomorrow"}, "must be like"),
    (FORM | {"begin": "2999-01-01T00:00"}, "nothing is selected"),
]


async def test_what_cannot_be_replayed_is_said_in_the_form(tmp_path: Path) -> None:
    async with served(tmp_path) as (both, _, browser), Admin(both.namesrv_address) as admin:
        await prepare(admin, 3)
        for form, why in UNUSABLE:
            answer = await browser.post(PATH, form)
            assert (answer.status, why in answer.text) == (400, True), answer.text


async def test_a_console_without_a_folder_for_jobs_begins_none(tmp_path: Path) -> None:
    async with served(tmp_path) as (both, console, browser), Admin(both.namesrv_address) as admin:
        await prepare(admin, 3)
        answer = await browser.post(PATH, {"review": token_of(await browser.post(PATH, FORM))})
        assert (answer.status, "--jobs DIR" in answer.text) == (400, True)
        assert console.audit.lines()[0].outcome == "failed"


async def test_a_read_only_console_lets_no_job_continue(tmp_path: Path) -> None:
    folder = tmp_path / "jobs"
    async with Standalone(tmp_path / "store") as both, Admin(both.namesrv_address) as admin:
        await prepare(admin)
        async with Console(both.namesrv_address, jobs=folder) as console:
            name = await begin(Browser(console), FORM | {"rate": "10"})
        sent = (await keys_in(admin, RETRY)).total()
        async with Console(both.namesrv_address, jobs=folder, read_only=True) as console:
            shown = await Browser(console).json(f"/local/jobs/{name}")
            assert (shown["job"]["is_here"], shown["job"]["is_cut"]) == (False, True)
        assert (await keys_in(admin, RETRY)).total() == sent


async def test_a_replay_of_a_clusters_user_waits_to_be_resumed(tmp_path: Path) -> None:
    folder = tmp_path / "jobs"
    anna = User("anna", Role.OPERATOR, Credentials(access_key="anna", secret_key="secret-of-anna"))
    async with Standalone(tmp_path / "store") as both, Admin(both.namesrv_address) as admin:
        await prepare(admin, 30)
        async with Console(both.namesrv_address, jobs=folder, authorize=lambda _: anna) as console:
            name = await begin(Browser(console), FORM | {"rate": "10"})
        assert not any(b"secret-of-anna" in path.read_bytes() for path in folder.iterdir())
        async with Console(both.namesrv_address, jobs=folder, authorize=lambda _: anna) as console:
            browser, path = Browser(console), f"/local/jobs/{name}"
            job = (await browser.json(path))["job"]
            assert (job["status"], job["is_here"], job["is_cut"]) == ("running", False, True)
            assert "Cut off" in (await browser.get(path)).text
            await browser.post(path, {"review": token_of(await browser.post(path, {"action": "resume"}))})
            await until(lambda: console.jobs.find(name).status is Status.DONE, "it ends")
        assert await keys_in(admin, RETRY) == {f"k{n}": 1 for n in range(30)}


async def test_who_sees_no_bodies_sees_no_shapes_of_them(tmp_path: Path) -> None:
    viewer = User("vera", Role.VIEWER)
    async with (
        served(tmp_path, hide_bodies=True, authorize=lambda _: viewer) as (both, _, browser),
        Admin(both.namesrv_address) as admin,
    ):
        await prepare(admin, 3)
        for query in ("", "?by=shape", "?property=rmqkit_reason"):
            shown = await browser.json(PATH + query)
            assert [one["kind"] for one in shown["found"]["kinds"]] == ["Orders", "Emails"], query

"""The same raw requests about popped messages to a real Apache broker and to ours: handles as proxies and other SDKs
build them, and messages with a priority."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

from rmqkit.broker.settings import BrokerSettings
from rmqkit.protocol.codes import RequestCode as Code
from rmqkit.protocol.command import Command, decode_fields
from rmqkit.protocol.schemas.send import SendMessageV2Request
from rmqkit.standalone import Standalone
from tests.broker.pop.test_priority import PRIORITY, SENDS, prioritized
from tests.broker.pops import Client, ack, change, named, pop
from tests.interop.apache import BROKER_NAME, CLUSTER, ApachePair
from tests.waiting import SECONDS

Scenario = Callable[["Broker", str], Awaitable[object]]
_numbers = itertools.count()


class Broker(Client):
    """One connection to a broker of either maker."""

    async def ask(self, code: int, body: bytes = b"", **fields: object) -> Command:
        command = Command(code, fields={name: str(value) for name, value in fields.items()}, body=body)
        return await self.client.call(self.address, command, 60_000)

    async def make(self, topic: str, attributes: str = "", queues: int = 4) -> Command:
        places = {"readQueueNums": queues, "writeQueueNums": queues, "perm": 6, "order": "false"}
        kind = {"topicFilterType": "SINGLE_TAG", "topicSysFlag": 0, "attributes": attributes}
        return await self.ask(Code.UPDATE_AND_CREATE_TOPIC, topic=topic, defaultTopic="TBW102", **places, **kind)

    async def post(self, topic: str, body: str, properties: str = "", queue: int = 1) -> str:
        """Send a message. Return its queue."""
        header = SendMessageV2Request("p", topic, "TBW102", 4, queue, 0, 1, 0, properties=properties)
        answer = await self.call(Code.SEND_MESSAGE_V2, header, body.encode())
        assert answer.code == 0, answer.remark
        return decode_fields(answer)["queueId"]

    async def show(self, topic: str, body: str, properties: str = "", queue: int = 1) -> str:
        """Send a message, and wait until the queue has it: the order of pops is defined only for messages in queues."""
        before = [await self.queue_end(topic, number) for number in range(4)]
        queue_id = await self.post(topic, body, properties, queue)
        async with asyncio.timeout(SECONDS):
            while await self.queue_end(topic, int(queue_id)) == before[int(queue_id)]:
                await asyncio.sleep(0.002)
        return queue_id

    async def queue_end(self, topic: str, queue_id: int) -> int:
        return int(decode_fields(await self.ask(Code.GET_MAX_OFFSET, topic=topic, queueId=queue_id))["offset"])

    async def pop_all(self, topic: str, group: str, count: int, **more: object) -> dict[str, tuple[object, str]]:
        """Pop until ``count`` messages have arrived. Return body → message and handle, in the order of arrival."""
        found: dict[str, tuple[object, str]] = {}
        async with asyncio.timeout(SECONDS):
            while len(found) < count:
                popped = await pop(self, BROKER_NAME, topic=topic, consumer_group=group, **more)
                found |= {body: (popped.messages[body], popped.handles[body]) for body in popped}
        return found


def of_both(scenario: Scenario, apache: ApachePair, root: Path) -> tuple[object, object]:
    """Return the results of a scenario with Apache's broker and with ours."""
    topic = f"Popped{next(_numbers)}"

    async def at(address: str) -> object:
        broker = Broker(address)
        try:
            return await scenario(broker, topic)
        finally:
            await broker.client.close()

    async def run() -> tuple[object, object]:
        settings = BrokerSettings(
            listen_port=0, bind_address="127.0.0.1", broker_name=BROKER_NAME, cluster_name=CLUSTER
        )
        theirs = await at(apache.broker_addr)
        async with Standalone(root, broker=settings) as ours:
            return theirs, await at(ours.broker_address)

    return asyncio.run(run())


def test_handles_of_eight_and_of_nine_words_are_accepted(apache: ApachePair, tmp_path: Path) -> None:
    async def scenario(broker: Broker, topic: str) -> object:
        await broker.make(topic)
        await broker.post(topic, "filler")
        for body in "abcdef":
            await broker.post(topic, body)
        group, codes = f"group-{topic}", {}
        popped = await broker.pop_all(topic, group, 7)

        def about(body: str, words: int) -> dict[str, object]:
            message, handle = popped[body]
            written = {8: handle, 9: f"{handle} {message.physical_offset}", 3: "1 2 3"}[words]
            return {**named(handle, group, topic), "extra_info": written}

        for body, words in (("a", 8), ("b", 9), ("c", 9)):
            codes[f"ack {words} {body}"] = (await ack(broker, popped[body][1], **about(body, words))).code
        for body, words in (("d", 8), ("e", 9)):
            codes[f"change {words} {body}"] = (await change(broker, popped[body][1], 500, **about(body, words)))[0]
        codes["ack 3"] = (await ack(broker, popped["f"][1], **about("f", 3))).code
        # The two messages with a shortened time are redelivered. The acknowledged one is not.
        again = await broker.pop_all(topic, group, 2)
        return codes, sorted(again)

    theirs, ours = of_both(scenario, apache, tmp_path)
    accepted = {"ack 8 a": 0, "ack 9 b": 0, "ack 9 c": 0, "change 8 d": 0, "change 9 e": 0, "ack 3": 1}
    assert theirs == ours == (accepted, ["d", "e"])


def test_words_behind_the_ninth_of_a_handle_are_not_read(apache: ApachePair, tmp_path: Path) -> None:
    async def scenario(broker: Broker, topic: str) -> object:
        await broker.make(topic)
        bodies = {"a": 6, "b": 7, "c": 10, "d": 12}
        for body in bodies:
            await broker.post(topic, body)
        group, codes = f"group-{topic}", {}
        popped = await broker.pop_all(topic, group, len(bodies))
        for body, count in bodies.items():
            handle = popped[body][1]
            written = " ".join([*handle.split(" "), "0", "x", "", "7"][:count])
            about = {**named(handle, group, topic), "extra_info": written}
            codes[count] = (await change(broker, handle, 60_000, **about))[0], (await ack(broker, handle, **about)).code
        return codes

    theirs, ours = of_both(scenario, apache, tmp_path)
    accepted = dict.fromkeys((6, 7, 10, 12), (0, 0))
    assert (theirs, ours) == (accepted, accepted | {6: (1, 1)})


def test_priorities_choose_the_queue_and_the_order(apache: ApachePair, tmp_path: Path) -> None:
    async def scenario(broker: Broker, topic: str) -> object:
        assert (await broker.make(topic, "+message.type=PRIORITY")).code == 0
        queues = [await broker.show(topic, str(number), properties) for number, properties in enumerate(SENDS)]
        popped = await broker.pop_all(topic, f"group-{topic}", len(SENDS))
        kept = [popped[str(number)][0].properties.get(PRIORITY) for number in range(len(SENDS))]
        return list(zip(queues, kept, strict=True)), list(popped)

    theirs, ours = of_both(scenario, apache, tmp_path)
    assert theirs == ours
    assert theirs[0] == list(SENDS.values())
    by_queue = sorted(range(len(SENDS)), key=lambda number: -int(list(SENDS.values())[number][0]))
    assert theirs[1] == list(map(str, by_queue))


def test_other_kinds_of_messages_lose_their_priority(apache: ApachePair, tmp_path: Path) -> None:
    async def scenario(broker: Broker, topic: str) -> object:
        await broker.make(topic, "+message.type=PRIORITY")
        kinds = ("DELAY\x011\x02", "TIMER_DELAY_MS\x01100\x02", "TIMER_DELAY_SEC\x011\x02", "__SHARDINGKEY\x01k\x02")
        queues = [await broker.post(topic, str(i), prioritized(3) + kind, 2) for i, kind in enumerate(kinds)]
        popped = await broker.pop_all(topic, f"group-{topic}", len(kinds))
        return queues, [(one.queue_id, one.properties.get(PRIORITY)) for one, _ in popped.values()]

    theirs, ours = of_both(scenario, apache, tmp_path)
    assert theirs == ours
    assert theirs[1] == [(2, None)] * 4


def test_three_settings_say_how_priorities_are_popped(apache: ApachePair, tmp_path: Path) -> None:
    async def scenario(broker: Broker, topic: str) -> object:
        await broker.make(topic, "+message.type=PRIORITY")
        for priority in (1, 3, 0, 2):
            await broker.show(topic, str(priority), prioritized(priority))
        found = {"at first": "".join(await broker.pop_all(topic, f"first-{topic}", 4))}

        async def changed(text: str) -> None:
            assert (await broker.ask(Code.UPDATE_BROKER_CONFIG, text.encode())).code == 0

        try:
            await changed("priorityOrderAsc=false")
            found["upwards"] = "".join(await broker.pop_all(topic, f"upwards-{topic}", 4))
            await changed("priorityOrderAsc=true\npopFromRetryProbability=100")
            group = f"retries-{topic}"
            await broker.pop_all(topic, group, 4, invisible_time=600_000)
            await broker.make(f"%RETRY%{group}_{topic}", queues=1)
            await broker.show(f"%RETRY%{group}_{topic}", "r", queue=0)
            await broker.show(topic, "9", prioritized(9))
            found["last"] = "".join(await broker.pop_all(topic, group, 2))
            await changed("popFromRetryProbabilityForPriority=100")
            await broker.show(f"%RETRY%{group}_{topic}", "s", queue=0)
            await broker.show(topic, "8", prioritized(8))
            found["first"] = "".join(await broker.pop_all(topic, group, 2))
        finally:
            await changed("priorityOrderAsc=true\npopFromRetryProbability=20\npopFromRetryProbabilityForPriority=0")
        for number in range(20):
            config = {"groupName": f"none{number}-{topic}", "attributes": {"+priority.factor": "0"}}
            made = await broker.ask(Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, json.dumps(config).encode())
            assert made.code == 0
        firsts = {next(iter(await broker.pop_all(topic, f"none{number}-{topic}", 6))) for number in range(20)}
        return found, len(firsts) > 1

    theirs, ours = of_both(scenario, apache, tmp_path)
    assert theirs == ours == ({"at first": "3210", "upwards": "0123", "last": "9r", "first": "s8"}, True)

"""The retries of one handler: how often, and how soon."""

from __future__ import annotations

from datetime import timedelta

import pytest

from rmqkit import ConsumeLater, PushConsumer, Retry, SettingsError, TimeIllegal
from rmqkit.client.runtime.settings import PushConsumerSettings
from rmqkit.protocol.codes import RequestCode, version_number
from rmqkit.protocol.properties import decode_properties
from tests.client.consumer.test_consume import Workers
from tests.client.consumer.test_reasons import KINDS
from tests.client.consumer.test_typed_bodies import dead_letters, running
from tests.client.messages import received
from tests.client.peers import until

EXACT = Retry(first=1, factor=3, longest=20, jitter=0)


@pytest.mark.parametrize(("retries", "delay_ms"), [(0, 1000), (1, 3000), (2, 9000), (3, 20_000), (2**31, 20_000)])
def test_delays_grow_up_to_the_longest(retries, delay_ms):
    assert EXACT.delay_ms(retries) == delay_ms


def test_the_random_part_is_on_both_sides_and_within_its_bounds():
    delays = [Retry(first=timedelta(seconds=10), jitter=0.2).delay_ms(0) for _ in range(1000)]
    assert 8000 <= min(delays) < 9000
    assert 11_000 < max(delays) <= 12_000


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"times": -1}, SettingsError),
        ({"factor": 0.5}, SettingsError),
        ({"factor": 1001}, SettingsError),
        ({"jitter": 1.1}, SettingsError),
        ({"jitter": -0.1}, SettingsError),
        ({"first": -1}, TimeIllegal),
        ({"longest": "1h"}, TimeIllegal),
    ],
)
def test_what_is_out_of_bounds_is_refused(given, error):
    with pytest.raises(error):
        Retry(**given)


@pytest.mark.parametrize(
    ("error", "tries", "level", "timed_ms"),
    [
        (ValueError(), 0, None, "1000"),
        (ValueError(), 2, None, "9000"),
        (ConsumeLater(), 1, None, "3000"),
        (ConsumeLater(delay=7), 1, None, "7000"),
        (ConsumeLater(5), 1, "5", None),
    ],
)
async def test_a_message_is_redelivered_when_its_handler_says(error, tries, level, timed_ms):
    async def handler(message):
        raise error

    async with Workers(handler, retry=EXACT) as it:
        it.runtime.broker_versions[it.cluster.broker.address] = version_number(5, 0, 0)
        it.put(received(0, reconsume_times=tries))
        await until(lambda: it.offset == 1, "sent back")
        assert [one["delayLevel"] for one in it.sent_back()] == ([] if level is None else [level])
        sent = it.cluster.broker.asked(RequestCode.SEND_MESSAGE_V2)
    assert [decode_properties(one["i"].encode())["TIMER_DELAY_MS"] for one in sent] == ([timed_ms] if timed_ms else [])


async def test_a_broker_without_a_timer_takes_the_next_longer_level():
    async def handler(message):
        raise ValueError

    async with Workers(handler, retry=EXACT) as it:
        it.put(received(0, reconsume_times=1))
        await until(lambda: it.offset == 1, "sent back")
        assert it.sent_back()[0]["delayLevel"] == "2"


@pytest.mark.parametrize(
    ("times", "tries", "is_last"),
    [(3, 2, False), (3, 3, True), (0, 0, True), (30, 16, False), (30, 30, True), (None, 15, False), (None, 16, True)],
)
async def test_the_handler_s_own_number_of_retries_decides(times, tries, is_last):
    async def handler(message):
        raise ValueError

    async with Workers(handler, retry=Retry(times=times)) as it:
        it.put(received(0, reconsume_times=tries))
        await until(lambda: it.offset == 1, "sent back")
        sent = it.cluster.broker.asked(RequestCode.SEND_MESSAGE_V2)
        assert len(sent) == is_last
        assert [one["maxReconsumeTimes"] for one in it.sent_back()] == ([] if is_last else [str(times or 16)])


@pytest.mark.parametrize("kind", KINDS)
async def test_every_kind_of_consumer_has_them(kind, tmp_path):
    async with running(tmp_path) as (address, producer):
        await producer.send("Orders", b"17")
        tries, consumer = [], KINDS[kind](address)

        @consumer.on("Orders", retry=Retry(times=2, first=1, longest=2, jitter=0))
        async def bill(message):
            tries.append(message.reconsume_times)
            raise ValueError

        async with consumer:
            (letter,) = await dead_letters(address, 1)
    assert tries == [0, 1, 2]
    assert letter.properties["rmqkit_tries"] == "3"


def test_retries_need_a_handler():
    consumer = PushConsumer("CG", "127.0.0.1:1", settings=PushConsumerSettings())
    with pytest.raises(SettingsError, match="retry of topic T has no handler: give one"):
        consumer.subscribe("T", retry=Retry())

"""Apache's Java client against the pytest plugin's broker, with its chaos dials turned up."""

from collections import Counter

import pytest

from tests.interop.probe import run_probe

COUNT = 200
GROUP = "java-group"


@pytest.mark.rmq(settings={"defaultTopicQueueNums": 4})
def test_a_java_client_gets_everything_at_least_once_in_chaos(rmq_broker, rmq_topic, apache_kit, tmp_path):
    chaos = rmq_broker.chaos(duplicate=1, delay=0.01, flush_timeout=0.3, rebalance_every=0.1, seed=5)
    run = run_probe(
        apache_kit,
        "both",
        namesrv=rmq_broker.name_server,
        topic=rmq_topic,
        count=COUNT,
        consumers={GROUP: "*"},
        work_dir=tmp_path,
    )
    assert run.exit_code == 0, f"{run.outcome}\n{chaos}"
    statuses, times = Counter(one.status for one in run.sent), Counter(one.msg_id for one in run.received)
    assert statuses["FLUSH_DISK_TIMEOUT"] > 0 and statuses.keys() == {"FLUSH_DISK_TIMEOUT", "SEND_OK"}, str(chaos)
    assert times.keys() == {one.msg_id for one in run.sent}
    assert set(times.values()) == {1, 2}, str(chaos)
    rmq_broker.assert_consumed(GROUP, rmq_topic, count=len(run.sent))
    assert chaos.happened.keys() == {"duplicate", "delay", "flush_timeout", "rebalance"}

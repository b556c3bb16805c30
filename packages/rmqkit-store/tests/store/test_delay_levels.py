import pytest

from rmqkit.errors import SettingsError
from rmqkit.store.settings import StoreSettings, delivery_time, parse_delay_levels


def test_the_eighteen_levels_of_the_default() -> None:
    delays = parse_delay_levels(StoreSettings().message_delay_level)
    assert [delay // 1000 for delay in delays] == [
        *(1, 5, 10, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 1200, 1800, 3600, 7200)
    ]


def test_days_are_a_unit() -> None:
    assert parse_delay_levels("1s 2d") == (1000, 172_800_000)


@pytest.mark.parametrize("text", ["1", "s", "1w", "1s,5s", "-1s", "", "  "])
def test_malformed_level_is_named(text: str) -> None:
    with pytest.raises(SettingsError, match="messageDelayLevel"):
        parse_delay_levels(text)


def test_levels_above_the_last_count_as_the_last() -> None:
    assert delivery_time((1000, 5000), 2, 10) == 5010
    assert delivery_time((1000, 5000), 9, 10) == 5010

"""The examples that Hypothesis generates in each profile.

===========  ==================================================================================
``same``     the same ones in every run, as many as each test sets: a failure can be repeated
``short``    only one in `SHORTER` of them, the first ones (``make test``; CI runs all)
``mutants``  as ``short``, without shrinking a failing example, which takes minutes (``make mutants``)
``long``     `LONGER` times as many, different ones in each run (``make examples``)
===========  ==================================================================================

Tests with random choices of their own, such as when to kill a process, take their seed from `chosen_seed`, by the same
rule. Hypothesis's time limits are off: on a busy machine they would fail a test.
"""

from __future__ import annotations

import random
from typing import Any

from hypothesis import HealthCheck, Phase, settings

SAME, SHORT, MUTANTS, LONG = "same", "short", "mutants", "long"
LONGER, SHORTER = 20, 3
_EXAMPLES = 100
"""The default number of examples."""

_PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile(SAME, _PATIENT, max_examples=_EXAMPLES, derandomize=True, database=None)
settings.register_profile(SHORT, _PATIENT, max_examples=_EXAMPLES // SHORTER, derandomize=True, database=None)
settings.register_profile(MUTANTS, settings.get_profile(SHORT), phases=[Phase.explicit, Phase.generate])
settings.register_profile(LONG, _PATIENT, max_examples=_EXAMPLES * LONGER, derandomize=False)


def examples(count: int, *, suppress: list[HealthCheck] | None = None, **more: Any) -> settings:
    """Return Hypothesis settings with the number of examples that `many` makes of ``count``.

    ``suppress``: more health checks to turn off.
    """
    return settings(max_examples=many(count), suppress_health_check=[HealthCheck.too_slow, *(suppress or [])], **more)


def many(count: int) -> int:
    """Return a number of generated inputs: ``count``, `LONGER` times as many, or one in `SHORTER`."""
    profile = settings.get_current_profile_name()
    return count * LONGER if profile == LONG else -(-count // SHORTER) if profile in (SHORT, MUTANTS) else count


def chosen_seed() -> int:
    """Return the seed of a test with random choices: the same in every run, a new one in ``make examples``.

    The seed is printed, so that a failure shows it."""
    seed = random.randrange(1 << 30) if settings.get_current_profile_name() == LONG else 4
    print(f"seed {seed}")
    return seed

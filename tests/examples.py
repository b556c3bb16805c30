"""Which examples Hypothesis makes up.

===========  ==================================================================================
``same``     the same ones in every run, as many as each test says: what fails once fails again
``short``    the first of them, one in `SHORTER` (``make test``; continuous integration does all)
``mutants``  as ``short``; a failing example is not made smaller, which takes minutes (``make mutants``)
``long``     `LONGER` times as many, others in each run (``make examples``)
===========  ==================================================================================

Tests that choose at random themselves, when to kill a process for instance, do so from `chosen_seed`, by the same rule.
How long an example takes, or making one up, is the machine's affair: Hypothesis's limits fail a test on a busy one.
"""

from __future__ import annotations

import random
from typing import Any

from hypothesis import HealthCheck, Phase, settings

SAME, SHORT, MUTANTS, LONG = "same", "short", "mutants", "long"
LONGER, SHORTER = 20, 3
_EXAMPLES = 100
"""Of tests that do not say how many."""

_PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile(SAME, _PATIENT, max_examples=_EXAMPLES, derandomize=True, database=None)
settings.register_profile(SHORT, _PATIENT, max_examples=_EXAMPLES // SHORTER, derandomize=True, database=None)
settings.register_profile(MUTANTS, settings.get_profile(SHORT), phases=[Phase.explicit, Phase.generate])
settings.register_profile(LONG, _PATIENT, max_examples=_EXAMPLES * LONGER, derandomize=False)


def examples(count: int, *, suppress: list[HealthCheck] | None = None, **more: Any) -> settings:
    """As many examples for a test, or what `many` makes of them. ``suppress``: checks that are of no use there."""
    return settings(max_examples=many(count), suppress_health_check=[HealthCheck.too_slow, *(suppress or [])], **more)


def many(count: int) -> int:
    """So many of what a test makes up itself, or `LONGER` times as many, or one in `SHORTER`."""
    profile = settings.get_current_profile_name()
    return count * LONGER if profile == LONG else -(-count // SHORTER) if profile in (SHORT, MUTANTS) else count


def chosen_seed() -> int:
    """What a test of random choices starts from: the same in every run, another one in ``make examples``. It is
    printed, so that a failure shows it."""
    seed = random.randrange(1 << 30) if settings.get_current_profile_name() == LONG else 4
    print(f"seed {seed}")
    return seed

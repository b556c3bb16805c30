"""What Apache's broker serves and ours does not yet: its behaviours carry `@apache_only(subject)`.

They run at Apache's alone. The summary of a run names the subjects, and `test_suite` fails as soon as our broker serves
one of them.
"""

from __future__ import annotations

import pytest

from rmqkit.protocol.codes import RequestCode

APACHE_ONLY: dict[str, RequestCode | None] = {
    "POP": RequestCode.POP_MESSAGE,
    "recall": RequestCode.RECALL_MESSAGE,
    "deliver-at": None,
    "changing settings": RequestCode.UPDATE_BROKER_CONFIG,
}
"""Subject → the request that our broker does not know; None: a message that is stored at once."""


def apache_only(subject: str) -> pytest.MarkDecorator:
    """Marks a behaviour of a subject in the table."""
    assert subject in APACHE_ONLY, f"{subject} is not in APACHE_ONLY"
    return pytest.mark.apache_only(subject)

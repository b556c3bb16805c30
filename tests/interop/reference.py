"""The tests whose expectation is an answer of Apache's 5.5.0. With an older version (`make interop APACHE=5.4.0`) they
are skipped with the reason: rmqkit answers as 5.5.0 does.
"""

from __future__ import annotations

__all__ = ["NEW", "reason_to_skip"]

_SINCE = (5, 5, 0)
NEW = {
    "test_admin_codes.py::test_the_answers_are_the_same[topics]": "message.type has the value LITE",
    "test_client_codes.py::test_the_answers_are_the_same[tables]": "offsets have a pullOffsetTable",
    "test_console.py::test_every_page_of_two_clusters_at_once": "the page names version 5.5.0",
    "test_raw_calls.py::test_apache_answers_as_the_spec_says[client_id_missing]": "SyncLiteSubscription exists",
    "test_raw_calls.py::test_apache_answers_as_the_spec_says[unimplemented]": "SyncLiteSubscription exists",
    "test_raw_calls.py::test_apache_answers_as_the_spec_says[settings]": "settings have lite fields",
    "test_raw_calls.py::test_ours_answers_as_apache[client_id_missing]": "SyncLiteSubscription exists",
    "test_raw_calls.py::test_ours_answers_as_apache[unimplemented]": "SyncLiteSubscription exists",
    "test_raw_calls.py::test_ours_answers_as_apache[priorities]": "messages have the type PRIORITY",
    "test_java_mqadmin.py::": "the table of commands is that of mqadmin 5.5.0",
    "test_lite_consumer.py::": "lite topics exist",
    "test_lite_tools.py::": "lite topics exist",
    "test_mqadmin_broker.py::test_the_output_is_the_same[add a wrong attribute]": "message.type has the value LITE",
    "test_python_pop.py::test_closing_gives_back_what_no_handler_began_with[apache]": "a suspended delivery is no try",
    "test_python_trace.py::test_the_trace_of_the_same_acts": "the trace of a timed message has the type DELAYED",
    "test_settings.py::": "the broker has further settings",
}
"""The start of a test's name, without its folder, and what is new in 5.5.0."""


def reason_to_skip(nodeid: str, version: str) -> str | None:
    """Return the reason why a test cannot run with a version of Apache's programs, or None."""
    if tuple(map(int, version.split("."))) >= _SINCE:
        return None
    name = nodeid.rpartition("/")[2]
    new = next((text for start, text in NEW.items() if name.startswith(start)), None)
    if new is None or "[ours]" in name:
        return None
    return f"new in 5.5.0, and this is {version}: {new}"

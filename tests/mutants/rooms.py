"""The rooms whose code is changed, with the tests that have to notice it, and the kinds of changes."""

from typing import NamedTuple

_SERVER, _CLIENT = "packages/rmqkit-server", "packages/rmqkit"
_STORE = "packages/rmqkit-store/tests/store"
_BROKER = f"{_SERVER}/src/rmqkit/broker"


class Room(NamedTuple):
    """Modules or folders of modules, and test files or folders, as paths from the root of the repository.
    The quickest tests come first: a run ends with the first failure."""

    code: tuple[str, ...]
    tests: tuple[str, ...]


ROOMS = {
    "pop": Room(
        (f"{_BROKER}/pop",),
        tuple(
            f"{_SERVER}/tests/broker/pop{file}"
            for file in (
                "/test_order.py",
                "/test_in_flight.py",
                "/test_long_polling.py",
                "/test_check_points.py",
                "/test_handlers.py",
                "/test_read.py",
                "/test_revive.py",
                "/test_shares.py",
                "",
            )
        ),
    ),
    "delay": Room(
        (f"{_BROKER}/delay",),
        tuple(
            f"{_SERVER}/tests/broker/delay{file}"
            for file in (
                "/test_destination.py",
                "/test_timer_state.py",
                "/test_dequeue.py",
                "/test_levels.py",
                "/test_survey.py",
                "/test_recall_bounds.py",
                "/test_timer_rounds.py",
                "",
            )
        ),
    ),
    "transaction": Room((f"{_BROKER}/transaction",), (f"{_SERVER}/tests/broker/transaction",)),
    "send-checks": Room(
        (f"{_BROKER}/send/checks.py", f"{_BROKER}/send/refusals.py", f"{_BROKER}/send/send_back.py"),
        tuple(f"{_SERVER}/tests/broker/send{file}" for file in ("/test_checks.py", "/test_send_back.py", "")),
    ),
    "durability": Room(
        (f"{_BROKER}/durability.py", "packages/rmqkit-store/src/rmqkit/store/flush.py"),
        (
            f"{_SERVER}/tests/broker/test_durability.py",
            f"{_STORE}/test_flush_queues.py",
            f"{_STORE}/test_flush.py",
            f"{_STORE}/log/test_transient_pool.py",
        ),
    ),
    "offsets": Room(
        (f"{_BROKER}/tables/offsets.py",),
        tuple(f"{_SERVER}/tests/broker/tables{file}" for file in ("/test_offset_table.py", "/test_offsets.py", "")),
    ),
    "routes": Room(
        (f"{_SERVER}/src/rmqkit/namesrv/routes.py", f"{_SERVER}/src/rmqkit/namesrv/brokers.py"),
        (f"{_SERVER}/tests/namesrv",),
    ),
    "remoting-limits": Room(
        (f"{_CLIENT}/src/rmqkit/remoting/limits.py", f"{_CLIENT}/src/rmqkit/remoting/connection.py"),
        tuple(
            f"{_CLIENT}/tests/remoting{file}"
            for file in ("/test_limits.py", "/test_connection.py", "/test_calls.py", "/test_link.py", "")
        ),
    ),
    "exactly-once": Room(
        ("packages/rmqkit-spark/src/rmqkit/spark/sink/ledger.py",),
        ("packages/rmqkit-spark/tests/spark/test_ledger.py", "packages/rmqkit-spark/tests/spark/test_check_back.py"),
    ),
    "sql92": Room((f"{_CLIENT}/src/rmqkit/filter/sql92.py",), (f"{_CLIENT}/tests/filter",)),
}

OPERATORS = (
    "AddNot",
    "ExceptionReplacer",
    "NumberReplacer",
    "ReplaceAndWithOr",
    "ReplaceOrWithAnd",
    "ReplaceBreakWithContinue",
    "ReplaceContinueWithBreak",
    "ReplaceTrueWithFalse",
    "ReplaceFalseWithTrue",
    "ReplaceUnaryOperator_Delete_(Not|USub)",
    "ReplaceBinaryOperator_(Add_Sub|Sub_Add|Mul_FloorDiv|FloorDiv_Mul|Div_Mul|Mod_FloorDiv|BitAnd_BitXor|LShift_RShift)",
    "ReplaceComparisonOperator_(Lt_LtE|LtE_Lt|Gt_GtE|GtE_Gt|Eq_NotEq|NotEq_Eq|Is_IsNot|IsNot_Is|Lt_Gt|Gt_Lt)",
    "ZeroIterationForLoop",
)
"""Operators of cosmic-ray without those that change annotations, which nothing evaluates, or only types."""

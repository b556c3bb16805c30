"""Transactions: END_TRANSACTION 37, CHECK_TRANSACTION_STATE 39, RESUME_CHECK_HALF_MESSAGE 323.

Source: remoting.md §4.3.5, §4.4.
"""

from __future__ import annotations

from msgspec import Struct

from rmqkit.protocol.codes import Int32, Int64


class EndTransactionRequest(Struct, rename="camel", kw_only=True, gc=False):
    """END_TRANSACTION; ``commit_or_rollback`` is 8 to commit, 12 to roll back, 0 when still unknown.
    ``tran_state_table_offset`` is the queue offset of the send response, ``commit_log_offset`` the physical one.
    Brokers do not insist on the group (a missing one is a wrong one) nor on the id."""

    topic: str | None = None
    producer_group: str | None = None
    tran_state_table_offset: Int64
    commit_log_offset: Int64
    commit_or_rollback: Int32
    from_transaction_check: bool = False
    msg_id: str | None = None
    transaction_id: str | None = None
    bname: str | None = None


class CheckTransactionRequest(Struct, rename="camel", kw_only=True, gc=False):
    """CHECK_TRANSACTION_STATE; the topic to trust is the one in the record of the body."""

    topic: str | None = None
    tran_state_table_offset: Int64
    commit_log_offset: Int64
    msg_id: str | None = None
    transaction_id: str | None = None
    offset_msg_id: str | None = None
    bname: str | None = None


class ResumeCheckRequest(Struct, rename="camel", kw_only=True, gc=False):
    """RESUME_CHECK_HALF_MESSAGE; ``msg_id`` is the offset message id of the half message."""

    topic: str | None = None
    msg_id: str

"""The transaction producer (``TransactionMQProducer``): a message is delivered only if a local transaction commits.

=====================================  =========================================================================
step                                   effect
=====================================  =========================================================================
half send                              the message is stored, invisible to consumers
… with another result than SEND_OK     rolled back; ``execute`` is not called
``execute(message, argument)``         the local transaction; its result is sent to the broker, one-way
CHECK_TRANSACTION_STATE                the broker did not receive a result: it sends a check to any producer of the
                                       group, and the result of ``check(message)`` is sent as above
either raises, or returns None         UNKNOWN: the broker checks again, by default up to 15 times, then gives up
=====================================  =========================================================================

At most 2000 checks wait. Further checks are dropped; the broker will repeat them. Use this module only on the event
loop.
Source: behaviour.md §7.9, §9.1; remoting.md §4.3.5.
"""

from __future__ import annotations

import asyncio
import contextvars
import enum
import inspect
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from rmqkit.client.observe.hooks import Hook, SendResult, SendStatus, TransactionEnd
from rmqkit.client.producer.encode import reporting_failure
from rmqkit.client.producer.producer import Producer
from rmqkit.client.runtime.lifecycle import keeps_open
from rmqkit.client.runtime.routes import NOT_REGISTERED
from rmqkit.client.runtime.runtime import ClientRuntime
from rmqkit.client.runtime.settings import ProducerSettings
from rmqkit.clock import SYSTEM_CLOCK, Clock
from rmqkit.errors import ConnectFailed, MessageIllegal, RemotingError
from rmqkit.protocol import properties as names
from rmqkit.protocol.ids import decode_offset_id
from rmqkit.protocol.message import Message, ReceivedMessage
from rmqkit.protocol.names import with_namespace
from rmqkit.protocol.record import TRANSACTION_COMMIT, TRANSACTION_PREPARED, TRANSACTION_ROLLBACK
from rmqkit.protocol.schemas.clients import MessageQueue
from rmqkit.protocol.schemas.send import CheckTransactionRequest, EndTransactionRequest
from rmqkit.remoting.tasks import Tasks, is_cancelled
from rmqkit.times import Duration, duration_ms

_CHECKS_WAITING_MAX = 2000
_CHECKS_AT_A_TIME = 4
_FINISH_SECONDS = 30.0
_CHECK_AFTER_MAX = 365 * 86_400

_log = logging.getLogger(__name__)
_at_work: contextvars.ContextVar[TransactionProducer | None] = contextvars.ContextVar("_at_work", default=None)


class TransactionState(enum.Enum):
    """The outcome of a local transaction (Java's ``LocalTransactionState``)."""

    COMMIT = TRANSACTION_COMMIT
    """Deliver the message to consumers."""
    ROLLBACK = TRANSACTION_ROLLBACK
    """Discard the message."""
    UNKNOWN = 0
    """The outcome is not known yet. The broker checks again later."""


_JAVA_NAMES = {
    TransactionState.COMMIT: "COMMIT_MESSAGE",
    TransactionState.ROLLBACK: "ROLLBACK_MESSAGE",
    TransactionState.UNKNOWN: "UNKNOW",
}
Execute = Callable[[Message, Any], "Awaitable[TransactionState | None] | TransactionState | None"]
Check = Callable[[ReceivedMessage], "Awaitable[TransactionState | None] | TransactionState | None"]


class TransactionResult(Struct):
    """The result of a send in a transaction.

    Attributes:
        sent: the result of the half send. Its ``msg_id`` identifies the transaction.
        state: the outcome that the producer has sent to the broker.
        error: the exception that ``execute`` raised, or None.
    """

    sent: SendResult
    state: TransactionState
    error: BaseException | None = None


class TransactionProducer(Producer):
    """A producer of messages that consumers get only if a local transaction commits::

        async def execute(message, argument):     # write to your database, with message.msg_id as the key
            return TransactionState.COMMIT

        async def check(message):                 # look whether message.msg_id is there
            return TransactionState.COMMIT if ... else TransactionState.ROLLBACK

        async with TransactionProducer("shop", execute=execute, check=check) as producer:
            result = await producer.send_in_transaction(Message(topic="Orders", body=b"17"), argument)

    Coroutine functions run on the event loop, plain functions in a thread. Every producer of a group must be able to
    check the transactions of all producers of this group. `close` waits at most 30 s for running local transactions. If
    a transaction takes longer, the broker sends its check to another producer of the group. All other arguments are the
    same as for a `Producer`.

    Args:
        execute: your local transaction. When the message is stored, it is called with the message and the argument.
        check: a function that is called with the stored message when the broker checks the outcome. This may happen
            more than once.
    """

    def __init__(
        self,
        group: str,
        name_servers: str | Sequence[str] | None = None,
        *,
        execute: Execute,
        check: Check,
        settings: ProducerSettings | None = None,
        runtime: ClientRuntime | None = None,
        clock: Clock = SYSTEM_CLOCK,
        hooks: Sequence[Hook] = (),
        wait_ready: Duration = 0,
    ) -> None:
        super().__init__(
            group, name_servers, settings=settings, runtime=runtime, clock=clock, hooks=hooks, wait_ready=wait_ready
        )
        self._execute = execute
        self._check = check
        self._questions: asyncio.Queue[tuple[str, CheckTransactionRequest, ReceivedMessage]]
        self._questions = asyncio.Queue(_CHECKS_WAITING_MAX)
        self._tasks = Tasks()
        self._threads = ThreadPoolExecutor(thread_name_prefix=f"rmqkit {group}")

    @keeps_open
    async def send_in_transaction(
        self,
        message: Message,
        argument: Any = None,
        *,
        timeout: Duration | None = None,
        check_after: Duration | None = None,
    ) -> TransactionResult:
        """Store a message, run the local transaction, and send its outcome to the broker.

        Args:
            timeout: the time to store the message, in seconds or as a `timedelta`.
            check_after: the time after the send in which the broker sends no checks, for local transactions that take
                long. The default is the broker's ``transactionTimeOut`` (6 s). If ``execute`` returns later, its
                outcome has no effect, and only the result of ``check`` is used.

        Raises MessageIllegal: the same as for `send`, or the message has a delay or a priority, or
        ``check_after`` is out of bounds.
        Raises NoRoute, PeerRefused, SendFailed, ClientError: the same as for `send`; the local transaction did not
        run."""
        sent = await self.send_half(message, timeout=timeout, check_after=check_after)
        result = TransactionResult(sent, TransactionState.ROLLBACK)
        end = EndTransactionRequest(
            topic=message.topic,
            producer_group=self.group,
            tran_state_table_offset=sent.queue_offset,
            # The response to a send has no field for the position in the log. Only the message id of the broker
            # contains it.
            commit_log_offset=decode_offset_id(sent.offset_msg_id)[2],
            commit_or_rollback=result.state.value,
            msg_id=sent.msg_id,
            transaction_id=sent.transaction_id,
            bname=self._runtime.routes.broker_of(sent.queue),
        )
        # If the message is stored less durably, roll back and do not run the transaction: the half message may be lost
        # with its broker.
        if sent.status is SendStatus.SEND_OK:
            named = replace(message, msg_id=sent.msg_id)
            result.state, result.error = await self._outcome(sent.msg_id, self._execute, named, argument)
            end.commit_or_rollback = result.state.value
        # Look up the address now, because the master may have changed while ``execute`` ran.
        address = self._runtime.routes.address(end.bname or "")
        await self._end(address, end, result.state, result.error, message)
        return result

    @keeps_open
    async def send_half(
        self,
        message: Message,
        *,
        timeout: Duration | None = None,
        queue: MessageQueue | None = None,
        check_after: Duration | None = None,
    ) -> SendResult:
        """Store a message for a transaction that is ended elsewhere (END_TRANSACTION). The message is invisible to
        consumers.
        Raises MessageIllegal, NoRoute, PeerRefused, SendFailed, ClientError: the same as for `send_in_transaction`."""
        if message.is_delayed:
            where = f"message for topic {message.topic} in a transaction"
            raise MessageIllegal(f"{where} cannot have a delay, brokers drop it: leave it out")
        if message.priority is not None:
            where = f"message for topic {message.topic} in a transaction"
            raise MessageIllegal(f"{where} cannot have a priority, brokers drop it: leave it out")
        group = with_namespace(self._runtime.namespace, self.group)
        own = {names.TRANSACTION_PREPARED: "true", names.PRODUCER_GROUP: group}
        if check_after is not None:
            try:
                seconds = math.ceil(duration_ms(check_after, "check_after") / 1000)
            except ValueError:
                seconds = 0
            if not 0 < seconds <= _CHECK_AFTER_MAX:
                where = f"check_after={check_after} of a message for topic {message.topic}"
                raise MessageIllegal(f"{where} must be more than 0 and at most {_CHECK_AFTER_MAX} seconds")
            own[names.CHECK_IMMUNITY_SECONDS] = str(seconds)
        prepared = self._prepare(message, own)
        # Brokers use the property TRAN_MSG. The bit is set, too, because Java's producers set it.
        prepared.sys_flag |= TRANSACTION_PREPARED
        if queue is not None:
            with reporting_failure(prepared):
                queue = await self._chosen(message, queue, None)
        return await self._sender.send(prepared, timeout_ms=self._time(timeout), queue=queue)

    def _register(self) -> None:
        self._runtime.register_producer(self.group, self._asked)

    async def _open(self) -> None:
        for number in range(_CHECKS_AT_A_TIME):
            self._tasks.start(self._answer_questions(), f"transaction checks {number} of group {self.group}")

    async def _finish(self) -> None:
        # Stop the checks before the last transactions. Brokers then send checks to another producer of the group.
        await self._tasks.close()
        await super()._finish()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _calls_ended(self) -> None:
        try:
            async with asyncio.timeout(_FINISH_SECONDS):
                await super()._calls_ended()
        except TimeoutError:
            said = "%s is closed with %d transactions under way: brokers will ask the group how they ended"
            _log.warning(said, self._described, self._calls)

    @property
    def _is_in_handler(self) -> bool:
        return _at_work.get() is self

    def _asked(self, address: str, header: CheckTransactionRequest, message: ReceivedMessage) -> None:
        try:
            # Tasks answer later, because the connection must be read while a local transaction is looked up.
            self._questions.put_nowait((address, header, message))
        except asyncio.QueueFull:
            _log.warning(
                "transaction %s: %d checks wait, the broker will check again", message.msg_id, _CHECKS_WAITING_MAX
            )

    async def _answer_questions(self) -> None:
        while True:
            address, header, message = await self._questions.get()
            state, error = await self._outcome(message.msg_id, self._check, message)
            answer = EndTransactionRequest(
                topic=message.topic,
                producer_group=self.group,
                tran_state_table_offset=header.tran_state_table_offset,
                commit_log_offset=header.commit_log_offset,
                commit_or_rollback=state.value,
                from_transaction_check=True,
                msg_id=message.msg_id,
                transaction_id=header.transaction_id,
                bname=header.bname,
            )
            # A check of a 4.9 broker has no ``bname``. The result is then sent to the address from which the check
            # came.
            await self._end(self._runtime.routes.address(header.bname or "") or address, answer, state, error, message)

    async def _outcome(
        self, msg_id: str, function: Callable[..., Any], *arguments: Any
    ) -> tuple[TransactionState, BaseException | None]:
        outside = _at_work.set(self)
        try:
            if inspect.iscoroutinefunction(function):
                outcome = await function(*arguments)
            else:
                # Start the function with the context, so that `close` inside `execute` recognizes its caller.
                run = contextvars.copy_context().run
                outcome = await asyncio.get_running_loop().run_in_executor(self._threads, run, function, *arguments)
                if inspect.isawaitable(outcome):
                    outcome = await outcome
            return TransactionState.UNKNOWN if outcome is None else TransactionState(outcome), None
        except asyncio.CancelledError as error:
            if is_cancelled():
                raise
            return TransactionState.UNKNOWN, error  # something that the function awaited was cancelled, not this task
        except Exception as error:  # noqa: BLE001 - the outer edge of the program's function: the broker checks again
            _log.warning("state of transaction %s is not known", msg_id, exc_info=error)
            return TransactionState.UNKNOWN, error
        finally:
            _at_work.reset(outside)

    async def _end(
        self,
        address: str | None,
        header: EndTransactionRequest,
        state: TransactionState,
        error: BaseException | None,
        message: Message | ReceivedMessage,
    ) -> None:
        self._hooks.transaction_ended(
            TransactionEnd(
                group=self.group,
                message=message,
                msg_id=header.msg_id or "",
                transaction_id=header.transaction_id,
                state=_JAVA_NAMES[state],
                address=address,
                is_checked=bool(header.from_transaction_check),
            )
        )
        remark = None if error is None else f"{type(error).__name__}: {error}"
        try:
            if address is None:
                raise ConnectFailed(header.bname or "broker", "no route names its master any more", NOT_REGISTERED)
            await self._runtime.calls.end_transaction(address, header, remark)
        except RemotingError as failure:
            _log.warning(
                "cannot report the end of transaction %s, the broker will check it: %s", header.msg_id, failure
            )

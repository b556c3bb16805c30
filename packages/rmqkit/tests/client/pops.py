"""A scripted broker that answers pops and records acks and changes."""

from __future__ import annotations

import msgspec

from rmqkit.client.runtime.settings import Pulling, PushConsumerSettings
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import Command, decode_fields, reply
from rmqkit.protocol.ids import decode_acked, decode_pop_handle
from rmqkit.protocol.schemas.clients import MessageQueue
from rmqkit.protocol.schemas.pop import BatchAckBody
from tests.client.messages import record
from tests.client.peers import Answer, Cluster, Peer, refused

POP, ACK, ACK_MANY = RequestCode.POP_MESSAGE, RequestCode.ACK_MESSAGE, RequestCode.BATCH_ACK_MESSAGE
CHANGE, ASSIGN = RequestCode.CHANGE_MESSAGE_INVISIBLETIME, RequestCode.QUERY_ASSIGNMENT
SEND_BACK = RequestCode.CONSUMER_SEND_MSG_BACK
EVERYWHERE = MessageQueue("T", "broker-0", -1)
QUICK = PushConsumerSettings(pull=Pulling(error_pause_ms=5), suspend_queue_ms=10)
POP_TIME = 1_795_224_862_948
UNSUPPORTED = refused(ResponseCode.REQUEST_CODE_NOT_SUPPORTED, "no such code")


def popped(*records: bytes, start: int = 0, revive_queue: int = 3, rest: int = 0, **fields: str) -> Answer:
    """An answer with records of queue 0, the first of the pop at offset ``start``."""
    offsets = {"startOffsetInfo": f"0 0 {start}", "msgOffsetInfo": f"0 0 {start}"}
    times = {"popTime": str(POP_TIME), "invisibleTime": "60000", "reviveQid": str(revive_queue), "restNum": str(rest)}
    return lambda command: reply(command, fields={**times, **offsets, **fields}, body=b"".join(records))


NOTHING = refused(ResponseCode.POLLING_TIMEOUT, "no message")


class PopBroker:
    """Answers pops from a list, then holds them; acks and changes are taken.
    ``acked`` are offsets of queue 0 and ``changed`` pairs of offset and ms, in the order they came."""

    def __init__(self, peer: Peer, *answers: Answer) -> None:
        self.peer = peer
        self.answers = list(answers)
        self.acked: list[int] = []
        self.changed: list[tuple[int, int]] = []
        peer.answer(POP, self._pop)
        peer.answer(ACK, self._ack)
        peer.answer(ACK_MANY, self._ack_many)
        peer.answer(CHANGE, self._change)
        peer.answer(SEND_BACK, reply)
        peer.answer(ASSIGN, UNSUPPORTED)

    @property
    def pops(self) -> list[dict[str, str]]:
        return self.peer.asked(POP)

    def _pop(self, command: Command) -> Command | None:
        return self.answers.pop(0)(command) if self.answers else None

    def _ack(self, command: Command) -> Command:
        self.acked.append(int(decode_fields(command)["offset"]))
        return reply(command)

    def _ack_many(self, command: Command) -> Command:
        for one in msgspec.json.decode(command.body, type=BatchAckBody).acks:
            self.acked += decode_acked(one.start_offset, one.acked)
        return reply(command)

    def _change(self, command: Command) -> Command:
        fields = decode_fields(command)
        assert decode_pop_handle(fields["extraInfo"]).queue_offset == int(fields["offset"])
        self.changed.append((int(fields["offset"]), int(fields["invisibleTime"])))
        answer = {"popTime": str(POP_TIME + len(self.changed)), "invisibleTime": fields["invisibleTime"]}
        return reply(command, fields={**answer, "reviveQid": "5"})


class PopCluster(Cluster):
    """One broker with topic T, which answers pops so."""

    def __init__(self, *answers: Answer, queues: int = 1) -> None:
        super().__init__()
        self.queues = queues
        self.pop = PopBroker(self.broker, *answers)

    async def __aenter__(self) -> PopCluster:
        await super().__aenter__()
        self.topic("T", queues=self.queues)
        return self


def records(*offsets: int, **properties: str) -> list[bytes]:
    return [record(offset, b"%d" % offset, **properties) for offset in offsets]


def quick(**changes) -> PushConsumerSettings:
    return msgspec.structs.replace(QUICK, **changes)

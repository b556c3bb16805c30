"""The answers to stored messages as whole frames, made from a template: what most of a broker's replies are.

All but five values are the same in every answer of a broker, so this is a fifth of the cost.
Source: remoting.md §1.2, §4.3.1.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping

from rmqkit.protocol.answer_templates import answer_template
from rmqkit.protocol.codes import ResponseCode
from rmqkit.protocol.frame import JSON, frame_start

__all__ = ["SendAnswers", "Stored"]

_PLAIN_COUNT = 5

Stored = tuple[int, bytes, int, bytes, bytes] | tuple[int, bytes, int, bytes, bytes, bytes]
"""Physical offset, queue id in digits, queue offset, unique key in letters and digits, of a timed message its recall
handle, opaque in digits."""


class SendAnswers:
    """Writes such frames.
    ``store_host``: the packed address that begins every message id.
    ``told``: further fields of every answer.
    ``code``: what is answered; the message is stored in any case."""

    __slots__ = ("_template", "_timed")

    def __init__(self, store_host: bytes, told: Mapping[str, str], code: int = ResponseCode.SUCCESS) -> None:
        forms = {"<id>": f"{store_host.hex().upper()}%016X", "<queue>": "%b", "<offset>": "%d", "<key>": "%b"}
        values = dict(zip(("msgId", "queueId", "queueOffset", "transactionId"), forms, strict=True))
        self._template = answer_template({**values, **told}, forms, code=code)
        timed = {**values, **told, "recallHandle": "<handle>"}
        handle = {'"recallHandle":"<handle>"': '"recallHandle":"%b"'}
        self._timed = answer_template(timed, forms | handle, code=code)

    def frames(self, answers: Iterable[Stored]) -> bytes:
        """The frames that say where messages lie, one behind the other."""
        template, timed, parts = self._template, self._timed, list[bytes]()
        for answer in answers:
            header = (template if len(answer) == _PLAIN_COUNT else timed) % answer
            parts += (_start(len(header)), header)
        return b"".join(parts)


@functools.lru_cache(maxsize=1024)
def _start(header_bytes: int) -> bytes:
    return frame_start(JSON, header_bytes, 0)

"""Request signatures of RocketMQ's access control: the plain ACL of 4.4 to 5.2, and auth since 5.3.

The ``extFields`` of a signed request include ``AccessKey``, ``Signature`` and optionally ``SecurityToken``::

        data      = values of all fields but Signature, in the order of their names (UTF-16 code units), concatenated,
                    UTF-8; then the body
        Signature = base64(HMAC-SHA1(secret key, data))

A server computes the signature over the fields that it received, so a field that is added on the way breaks it.
Source: remoting.md §3.3.

`Signature` covers neither the request's code nor its time. Clients of rmqkit therefore send two more fields, which
Apache's servers ignore. `Signature` covers these fields, too::

    RmqSigned    = time in ms since the epoch, the client's session, the request's number in the session; with blanks
    data         = "rmqkit request 1", code; then for every field except the two signatures, in the order of names:
                   length and name, length and value; then -1 and the body. Code and lengths are int32, text is UTF-8
    RmqSignature = base64(HMAC-SHA256(secret key, data))
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import struct
from collections.abc import Mapping

from msgspec import Struct

from rmqkit.errors import HeaderError
from rmqkit.protocol.command import Body

ACCESS_KEY = "AccessKey"
SECURITY_TOKEN = "SecurityToken"
SIGNATURE = "Signature"
FULL_SIGNATURE = "RmqSignature"
_SIGNED = "RmqSigned"
_INT32 = struct.Struct(">i")
_WORD_MAX = 32


def sign(fields: Mapping[str, str], body: Body | list[Body], secret_key: str) -> str:
    """Return the signature of a request. ``fields`` must contain the access key. A signature in ``fields`` is
    ignored."""
    digest = hmac.new(secret_key.encode(), _values(fields), hashlib.sha1)
    for piece in body if isinstance(body, list) else [body]:
        digest.update(piece)
    return base64.b64encode(digest.digest()).decode()


def verify(fields: Mapping[str, str], body: Body | list[Body], secret_key: str) -> bool:
    """Return True if a request was signed with a secret key. The comparison takes the same time for every wrong
    signature."""
    expected = sign(fields, body, secret_key)
    # Compare bytes: `compare_digest` accepts only ASCII text, and a received signature may be any text.
    return hmac.compare_digest(expected.encode(), fields.get(SIGNATURE, "").encode("utf-8", "replace"))


def _values(fields: Mapping[str, str]) -> bytes:
    """Return the signed values in Java's order, by UTF-16 units: characters above U+FFFF precede U+E000 to U+FFFF."""
    names = sorted(fields, key=lambda name: name.encode("utf-16-be", "surrogatepass"))
    return "".join([fields[name] for name in names if name != SIGNATURE]).encode("utf-8", "replace")


class FullSignature(Struct, frozen=True):
    """The time of a signature, the client's session, and the number of the request in the session."""

    signed_ms: int
    session: str
    number: int


def sign_fully(code: int, fields: Mapping[str, str], body: Body | list[Body], secret_key: str) -> str:
    """Return the full signature of a request. ``fields`` must contain the user and ``RmqSigned``."""
    digest = hmac.new(secret_key.encode(), b"rmqkit request 1" + _INT32.pack(code), hashlib.sha256)
    # Sort by code points, because both peers are rmqkit. `_values` uses Java's order. Each order is part of its
    # signature, so neither can be changed to match the other.
    for name in sorted(fields):
        if name not in (SIGNATURE, FULL_SIGNATURE):
            for text in (name.encode("utf-8", "replace"), fields[name].encode("utf-8", "replace")):
                digest.update(_INT32.pack(len(text)) + text)
    digest.update(_INT32.pack(-1))
    for piece in body if isinstance(body, list) else [body]:
        digest.update(piece)
    return base64.b64encode(digest.digest()).decode()


def full_fields(signature: FullSignature) -> dict[str, str]:
    """Return ``RmqSigned`` with the time, session and number of a signature."""
    return {_SIGNED: f"{signature.signed_ms} {signature.session} {signature.number}"}


def verify_fully(
    code: int, fields: Mapping[str, str], body: Body | list[Body], secret_key: str
) -> FullSignature | None:
    """Return time, session and number of a full signature, or None if the request has none.
    Raises HeaderError: the signature is wrong."""
    if FULL_SIGNATURE not in fields:
        return None
    words = fields.get(_SIGNED, "").split(" ")
    expected = sign_fully(code, fields, body, secret_key)
    is_right = hmac.compare_digest(expected.encode(), fields[FULL_SIGNATURE].encode("utf-8", "replace"))
    # Limit the length before `int` parses the words: `int` raises ValueError for very long numbers.
    if not is_right or len(words) != 3 or not (words[0] + words[2]).isdecimal() or max(map(len, words)) > _WORD_MAX:
        raise HeaderError(f"{FULL_SIGNATURE} does not fit the request")
    return FullSignature(int(words[0]), words[1], int(words[2]))

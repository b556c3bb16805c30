"""Request signatures of RocketMQ's access control: plain ACL of 4.4 to 5.2 and auth from 5.3 on.

A signed request carries ``AccessKey``, maybe ``SecurityToken``, and ``Signature`` among its ``extFields``::

    data      = values of all fields but Signature, in the order of their names (UTF-16 code units), nothing between
                them, UTF-8; then the body
    Signature = base64(HMAC-SHA1(secret key, data))

A server computes it over what it received, so whatever is added on the way breaks it. Source: remoting.md §3.3.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Mapping

from rmqkit.protocol.command import Body

__all__ = ["ACCESS_KEY", "SECURITY_TOKEN", "SIGNATURE", "sign", "verify"]

ACCESS_KEY = "AccessKey"
SECURITY_TOKEN = "SecurityToken"
SIGNATURE = "Signature"


def sign(fields: Mapping[str, str], body: Body | list[Body], secret_key: str) -> str:
    """The signature of a request; ``fields`` hold the access key already, a signature among them does not count."""
    digest = hmac.new(secret_key.encode(), _values(fields), hashlib.sha1)
    for piece in body if isinstance(body, list) else [body]:
        digest.update(piece)
    return base64.b64encode(digest.digest()).decode()


def verify(fields: Mapping[str, str], body: Body | list[Body], secret_key: str) -> bool:
    """Whether a request was signed with a secret key; takes the same time for every wrong signature."""
    expected = sign(fields, body, secret_key)
    return hmac.compare_digest(expected.encode(), fields.get(SIGNATURE, "").encode("utf-8", "replace"))


def _values(fields: Mapping[str, str]) -> bytes:
    """Java orders text by UTF-16 units: characters beyond U+FFFF come before U+E000 to U+FFFF."""
    names = sorted(fields, key=lambda name: name.encode("utf-16-be", "surrogatepass"))
    return "".join([fields[name] for name in names if name != SIGNATURE]).encode("utf-8", "replace")

"""Users of a proxy: authentication and authorization of calls with users and policies of the brokers
(``AuthenticationPipeline`` and ``AuthorizationPipeline`` with the ``Proxy…MetadataProvider`` classes).

A proxy stores no users. It requests a user from a master of its cluster with AUTH_GET_USER, and the user's policies
with AUTH_GET_ACL. Both are cached for 20 s, so a change takes effect within 20 s. While no master answers, cached
answers are used for up to 300 s. Users must be the same at all brokers: create them with ``mqadmin createUser -c``.

The proxy signs all its requests as one user, so brokers cannot check the permissions of clients: the proxy checks them.
This user is the brokers' own user, ``innerClientAuthenticationCredentials``, which needs no policy.
Source: grpc.md §2.2, §2.3, §11.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Annotated, TypeVar

from msgspec import Struct

from rmqkit.clock import Clock
from rmqkit.errors import HeaderError, RmqError, SettingsError
from rmqkit.policies import SUPER, PolicyIndex
from rmqkit.protocol.acl import ACCESS_KEY, verify, verify_fully
from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.command import Command, decode_fields
from rmqkit.protocol.fastjson import decode_as
from rmqkit.protocol.schemas.access import AclInfo, SubjectRequest, UserInfo, UserRequest
from rmqkit.proxy.backend import Wanted
from rmqkit.proxy.remote.cache import Cache
from rmqkit.proxy.schema.status import Code, Refused, refusal_of
from rmqkit.remoting.authentication import GRPC_WINDOW, GRPC_WINDOW_MS, CallSignature, Credentials, secret_of
from rmqkit.settings import Setting

__all__ = ["ProxyUserSettings", "Users"]

_STALE_MS = 300_000.0

T = TypeVar("T")
_log = logging.getLogger(__name__)


class ProxyUserSettings(Struct, kw_only=True):
    """The settings of a proxy for users, with the keys of ``rmq-proxy.json``."""

    authentication_enabled: Annotated[
        bool, Setting("authenticationEnabled", "accept only calls that a user has signed; brokers provide the users")
    ] = False
    authorization_enabled: Annotated[
        bool, Setting("authorizationEnabled", "let users do only what policies allow; needs authenticationEnabled")
    ] = False
    inner_credentials: Annotated[
        str,
        Setting(
            "innerClientAuthenticationCredentials",
            'credentials for the proxy\'s own requests, the same as the brokers\': {"accessKey":"…","secretKey":"…"}',
            secret=True,
        ),
    ] = ""
    grpc_window_ms: Annotated[int, GRPC_WINDOW] = GRPC_WINDOW_MS
    cluster: Annotated[
        str,
        Setting(
            "rocketMQClusterName", "cluster that provides the users; default: the only cluster that name servers know"
        ),
    ] = ""


class Users:
    """The check of the signatures and permissions of calls. Use it only on the event loop.

    Args:
        inner: the credentials of the proxy; calls signed with them have all permissions, as at a broker.
        ask: sends a request code and header to a master, and returns the body of the answer.

    Raises SettingsError: authorization is enabled without authentication.
    """

    def __init__(
        self,
        settings: ProxyUserSettings,
        inner: Credentials | None,
        ask: Callable[[RequestCode, Struct], Awaitable[bytes]],
        clock: Clock,
    ) -> None:
        if settings.authorization_enabled and not settings.authentication_enabled:
            raise SettingsError("authorizationEnabled=true needs authenticationEnabled=true: users could be anybody")
        self._must_sign = settings.authentication_enabled
        self._clock = clock
        self._grpc_window_ms = settings.grpc_window_ms
        self.has_policies = settings.authorization_enabled
        self._inner = inner
        self._ask = ask
        self._users = Cache(self._fetch_user, clock, stale_ms=_STALE_MS)
        self._policies = Cache(self._fetch_policies, clock, stale_ms=_STALE_MS)

    async def signer(self, metadata: Mapping[str, str]) -> str | None:
        """Return the user who signed a call, or None if authentication is off.

        Raises Refused: no known user signed the call, or no broker answers.
        """
        if not self._must_sign:
            return None
        try:
            signature = CallSignature.of(metadata.get("x-mq-date-time"), metadata.get("authorization"))
            found = None if self._is_inner(signature.user) or not signature.user else await self._user(signature.user)
            secret, remark = secret_of(signature.user, self._inner, lambda name: found)
            signature.check(secret, remark, self._clock.now_ms(), self._grpc_window_ms)
        except HeaderError as error:
            raise Refused(Code.UNAUTHORIZED, str(error)) from None
        return signature.user

    async def sender(self, command: Command) -> str | None:
        """Return the user of a remoting request, like `signer`. The broker checks that the request is not a replay."""
        if not self._must_sign:
            return None
        try:
            fields = decode_fields(command)
            name = fields.get(ACCESS_KEY)
            found = None if not name or self._is_inner(name) else await self._user(name)
            secret, remark = secret_of(name, self._inner, lambda _: found)
            if remark is None and not verify(fields, command.body, secret):
                remark = "check signature failed."
            if remark is not None:
                raise Refused(Code.UNAUTHORIZED, remark)
            # The second signature is optional: Apache's clients send only the first signature, which is required.
            verify_fully(command.code, fields, command.body, secret)
        except HeaderError as error:
            raise Refused(Code.UNAUTHORIZED, f"check signature failed: {error}.") from None
        return name

    async def check(self, user: str | None, wanted: Iterable[Wanted], addresses: Sequence[str]) -> None:
        """Check permissions. Raises Refused: policies do not allow the user all of ``wanted``, or no broker answers."""
        assert user is not None, "with policies every call is signed"
        if not (wanted := list(wanted)) or self._is_inner(user):
            return
        if (found := await self._user(user)) is None:
            raise Refused(Code.UNAUTHORIZED, f"User:{user} not found.")
        if found.user_type == SUPER:
            return
        policies = await self._cached(self._policies, user)
        index = PolicyIndex(user, None) if policies is None else policies
        for resource, actions in wanted:
            if (remark := index.refusal(resource, actions, addresses)) is not None:
                raise Refused(Code.UNAUTHORIZED, remark)

    # -- inside

    def _is_inner(self, name: str) -> bool:
        return self._inner is not None and name == self._inner.access_key

    async def _user(self, name: str) -> UserInfo | None:
        return await self._cached(self._users, name)

    @staticmethod
    async def _cached(entries: Cache[T], name: str) -> T | None:
        """Return the cached or a new answer of a broker about a user. Raises Refused: no broker answers."""
        try:
            return await entries.find(name)
        except RmqError as error:
            _log.warning("cannot get user %s from a broker: %s", name, error)
            refused = refusal_of(error)
            raise Refused(refused.code, f"the proxy cannot ask for user {name}: {refused.text}") from None

    async def _fetch_user(self, name: str) -> UserInfo | None:
        body = await self._ask(RequestCode.AUTH_GET_USER, UserRequest(name))
        return decode_as(body, UserInfo) if body else None

    async def _fetch_policies(self, name: str) -> PolicyIndex | None:
        body = await self._ask(RequestCode.AUTH_GET_ACL, SubjectRequest(f"User:{name}"))
        return PolicyIndex(name, decode_as(body, AclInfo)) if body else None

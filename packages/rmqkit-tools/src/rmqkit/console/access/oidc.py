"""Login by OpenID Connect: the authorization code flow with PKCE, and roles from claims.

=====================  ================================================================================================
step                   proof
=====================  ================================================================================================
``begin``              no proof. The browser gets a random cookie and opens the provider; ``state``, ``nonce`` and the
                       PKCE verifier are HMACs of the cookie with a key of this process, so no state is stored
``finish``: state      the same browser began the login: an attacker cannot log in a victim as the attacker
code and verifier      the provider issued the code for this login, to the client id and secret of this console
ID token               a key of the provider signed it (never ``none``, never a shared secret); ``iss``, ``aud``,
                       ``azp``, ``exp``, ``iat``, ``nonce`` and ``at_hash`` are right
role                   the settings map a value of ``roleClaim`` to a role; a user without a role is refused
=====================  ================================================================================================

A user of the provider has no credentials of the cluster. Requests are signed as the console's own user, and the console
enforces the role. The name has the prefix ``oidc:``, which no name in a file of users can have. The library Authlib
blocks, so it is called in threads. Use this module only on the event loop.
Source: OpenID Connect Core 1.0 section 3.1, RFC 9207.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import logging
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, unquote, urlencode, urlsplit

import msgspec
from authlib.common.errors import AuthlibBaseError
from authlib.integrations.requests_client import OAuth2Session
from authlib.oidc.core import CodeIDToken
from joserfc import jwt
from joserfc.errors import JoseError
from joserfc.jwk import KeySet
from msgspec import Struct
from requests import RequestException

from rmqkit.clock import Clock
from rmqkit.console.access.logins import LoginRefused, Role, User
from rmqkit.console.access.security import is_loopback
from rmqkit.console.threads import in_thread
from rmqkit.errors import SettingsError
from rmqkit.sentences import _

__all__ = ["Oidc", "OidcSettings"]

T = TypeVar("T")
STEP_S, ANSWER_S = 5.0, 10.0
LOGIN_MS, FRESH_MS, AGAIN_MS = 600_000, 300_000, 5_000
LEEWAY_S = 60
_log = logging.getLogger(__name__)
ALGORITHMS = ["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA", "Ed25519"]


class OidcSettings(Struct, rename="camel", kw_only=True, forbid_unknown_fields=True):
    """The content of the JSON file of ``--oidc``.

    Attributes:
        issuer: the address of the provider, as in its discovery document.
        client_id, client_secret: the credentials of the console; without a secret, the console is a public client.
        roles: the values of ``role_claim`` that grant each role; ``*`` for every user who can log in.
        role_claim: a claim of the ID token (text or list); with dots for nested objects: ``realm_access.roles``.
        name_claim: the claim with the user's name; if the claim is missing, ``sub`` is used.
        scope: the requested scopes.
        label: the provider's name on the login page.
    """

    issuer: str
    client_id: str
    roles: dict[Role, list[str]]
    client_secret: str = ""
    role_claim: str = "groups"
    name_claim: str = "preferred_username"
    scope: str = "openid profile email"
    label: str = "OpenID Connect"

    @classmethod
    def load(cls, path: Path) -> OidcSettings:
        """Load the file. Raises SettingsError: the file cannot be read or is not valid."""
        try:
            found = msgspec.json.decode(path.read_bytes(), type=cls)
        except (OSError, ValueError) as error:
            raise SettingsError(f"--oidc {path}: {getattr(error, 'strerror', None) or error}") from None
        if not is_safe(found.issuer):
            raise SettingsError(f"--oidc {path}: issuer {found.issuer} must be https://…, or http:// on this machine")
        if "openid" not in found.scope.split() or not any(found.roles.values()):
            raise SettingsError(f"--oidc {path}: scope must have openid, and roles at least one value")
        return found


class _Provider(Struct):
    """The used fields of a discovery document."""

    issuer: str
    authorization_endpoint: str
    token_endpoint: str
    jwks_uri: str
    end_session_endpoint: str = ""
    token_endpoint_auth_methods_supported: tuple[str, ...] = ("client_secret_basic",)


def is_safe(url: str) -> bool:
    """Return True if an address has the scheme https, or http on this machine."""
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
    except ValueError:
        return False
    return bool(host) and (parts.scheme == "https" or (parts.scheme == "http" and is_loopback(host)))


class Oidc:
    """The logins by one provider. The discovery document is cached for 5 minutes, the keys are never cached."""

    def __init__(self, settings: OidcSettings, clock: Clock) -> None:
        self.settings = settings
        self._clock = clock
        self._key = secrets.token_bytes(32)
        self._asking = asyncio.Lock()
        self._provider: _Provider | None = None
        self._trouble = ""
        self._asked_again_ms = 0.0

    async def begin(self, redirect_uri: str, back: str) -> tuple[str, str]:
        """Return the address of the provider's login page, and a cookie. ``back`` is the path to show after the login.
        Raises LoginRefused: the provider does not answer."""
        provider = await self._discovered()
        back = back if len(back) < 1_000 else ""  # browsers drop a cookie of more than 4 KB
        cookie = f"{secrets.token_urlsafe(32)}.{self._clock.now_ms()}.{quote(back, safe='')}"
        with self._session(provider, redirect_uri) as session:
            address, __ = session.create_authorization_url(
                provider.authorization_endpoint, state=self._derived("state", cookie),
                nonce=self._derived("nonce", cookie), code_verifier=self._derived("verifier", cookie),
            )  # fmt: skip
        return address, cookie

    async def finish(self, query: Mapping[str, str], cookie: str, redirect_uri: str) -> tuple[User, str]:
        """Return the user in the provider's answer, and the path to show. Raises LoginRefused: the login failed."""
        label, settings = self.settings.label, self.settings
        # Check the state first: an attacker may have forged a request with a wrong state.
        state = self._derived("state", cookie)
        if not cookie or not hmac.compare_digest(query.get("state", "").encode(), state.encode()):
            raise LoginRefused(_("this login was not begun in this browser, or the console restarted: begin again"))
        __, began_ms, back = cookie.split(".", 2)
        if self._clock.now_ms() - int(began_ms) > LOGIN_MS:
            raise LoginRefused(_("this login took more than 10 minutes: begin again"))
        if query.get("iss", settings.issuer) != settings.issuer:
            raise LoginRefused(_("the answer is of another provider than {label}", label=label))
        if "code" not in query:
            said = " ".join(filter(None, (query.get("error", ""), query.get("error_description", ""))))[:300]
            raise LoginRefused(_("{label} did not log you in: {said}", label=label, said=said or _("no reason given")))
        provider = await self._discovered()
        claims = await self._asked(lambda: self._claims(provider, query["code"], cookie, redirect_uri))
        return self._user(claims), unquote(back)

    async def leave_address(self, back: str) -> str:
        """Return the address of the provider's page that ends its session; empty if there is no such page."""
        try:
            end = (await self._discovered()).end_session_endpoint
        except LoginRefused:
            return ""
        wanted = urlencode({"client_id": self.settings.client_id, "post_logout_redirect_uri": back})
        return f"{end}{'&' if '?' in end else '?'}{wanted}" if end and is_safe(end) else ""

    def _derived(self, purpose: str, cookie: str) -> str:
        digest = hmac.digest(self._key, f"{purpose}\0{cookie}".encode(), "sha256")
        return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()

    def _session(self, provider: _Provider | None, redirect_uri: str = "") -> Any:
        """Return a session of Authlib that follows no redirects. The addresses of a provider need no redirects."""
        method = "client_secret_basic" if self.settings.client_secret else "none"
        if provider is not None and method not in (known := provider.token_endpoint_auth_methods_supported):
            method = "client_secret_post" if "client_secret_post" in known else method
        session = OAuth2Session(
            self.settings.client_id, self.settings.client_secret or None, scope=self.settings.scope,
            redirect_uri=redirect_uri, code_challenge_method="S256", token_endpoint_auth_method=method,
            default_timeout=STEP_S,
        )  # fmt: skip
        session.max_redirects = 0
        return session

    # -- requests to the provider, in threads

    async def _asked(self, asking: Callable[[], T]) -> T:
        """Return the result of a request in a thread. Raises LoginRefused: the provider gives no valid answer."""
        label = self.settings.label
        try:
            return await in_thread(asking, ANSWER_S)
        except TimeoutError:
            raise LoginRefused(_("{label} does not answer within {s:g} s", label=label, s=ANSWER_S)) from None
        except JoseError as error:
            raise LoginRefused(_("the ID token of {label} is refused: {error}", label=label, error=error)) from None
        except (AuthlibBaseError, RequestException, ValueError, LookupError, TypeError) as error:
            # The text of a network error contains the address and more, so show only the type of the error.
            why = type(error).__name__ if isinstance(error, RequestException) else str(error)[:300]
            raise LoginRefused(_("{label} cannot be asked: {why}", label=label, why=why)) from None

    async def _discovered(self) -> _Provider:
        # Send one request at a time and cache failures: unauthenticated clients can trigger this request.
        async with self._asking:
            if self._clock.monotonic_ms() >= self._asked_again_ms:
                try:
                    self._provider, self._trouble = await self._asked(self._discover), ""
                except LoginRefused as refused:
                    self._provider, self._trouble = None, str(refused)
                    _log.warning("console: no user can log in by OpenID Connect: %s", refused)
                self._asked_again_ms = self._clock.monotonic_ms() + (AGAIN_MS if self._trouble else FRESH_MS)
            if self._provider is None:
                raise LoginRefused(self._trouble)
            return self._provider

    def _discover(self) -> _Provider:
        issuer = self.settings.issuer
        with self._session(None) as session:
            answer = session.get(f"{issuer.rstrip('/')}/.well-known/openid-configuration", withhold_token=True)
        answer.raise_for_status()
        found = msgspec.json.decode(answer.content, type=_Provider)
        if found.issuer != issuer:
            raise ValueError(_("it calls itself {found}, and the settings {issuer}", found=found.issuer, issuer=issuer))
        for address in (found.authorization_endpoint, found.token_endpoint, found.jwks_uri):
            if not is_safe(address):
                raise ValueError(_("its address {address} is not https", address=address))
        return found

    def _claims(self, provider: _Provider, code: str, cookie: str, redirect_uri: str) -> Mapping[str, Any]:
        """Return the claims of a user. Raises JoseError: the ID token is not valid."""
        with self._session(provider, redirect_uri) as session:
            token = session.fetch_token(
                provider.token_endpoint, code=code, code_verifier=self._derived("verifier", cookie)
            )
            keys = session.get(provider.jwks_uri, withhold_token=True)
        keys.raise_for_status()
        if not isinstance(token.get("id_token"), str):
            raise ValueError(_("its answer has no ID token"))
        found = jwt.decode(token["id_token"], KeySet.import_key_set(keys.json()), algorithms=ALGORITHMS)
        client = self.settings.client_id
        wanted = {"iss": provider.issuer, "aud": client}
        options = {name: {"essential": True, "value": value} for name, value in wanted.items()}
        expected = {"client_id": client, "access_token": token.get("access_token")}
        expected["nonce"] = self._derived("nonce", cookie)
        claims = CodeIDToken(found.claims, found.header, options, expected)
        claims.validate(now=self._clock.now_ms() // 1000, leeway=LEEWAY_S)
        return dict(claims)

    def _user(self, claims: Mapping[str, Any]) -> User:
        settings, claim = self.settings, self.settings.role_claim
        name = "".join(filter(str.isprintable, str(claims.get(settings.name_claim) or claims["sub"])))[:100]
        value = claims.get(claim)
        if value is None:
            value = claims
            for word in claim.split("."):
                value = value.get(word) if isinstance(value, Mapping) else None
        held = {str(one) for one in (value if isinstance(value, list) else [value]) if one is not None}
        for role in (Role.ADMIN, Role.OPERATOR, Role.VIEWER):
            if (held | {"*"}) & set(settings.roles.get(role, ())):
                return User(f"oidc:{name}", role)
        said = ", ".join(sorted(held))[:300] or _("missing")
        raise LoginRefused(_("{name} has no role here: claim {claim} is {said}", name=name, claim=claim, said=said))

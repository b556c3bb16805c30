"""A small provider of OpenID Connect on loopback: discovery, tokens, keys. Its login page accepts every user; tests
without a browser call `Provider.log_in` instead."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import parse_qs, parse_qsl, urlencode, urlsplit

from joserfc import jwt
from joserfc.jwk import KeySet, RSAKey
from msgspec import Struct, field

from rmqkit.clock import SYSTEM_CLOCK

CLIENT, SECRET = "rmq-console", "the-secret-of-the-client"
KEY, OTHER_KEY = (RSAKey.generate_key(2048, {"kid": name}) for name in ("one", "other"))


class Provider(Struct):
    """The provider. A test changes ``claims``, ``document`` and ``sign`` to forge answers.

    Attributes:
        claims: claims that are added to the ID token or replace its claims. None removes a claim.
        document: members that are added to the discovery document.
        sign: ``key``, ``other key``, ``none`` or ``secret``.
        asked: paths of the received requests.
    """

    port: int = 0
    host: str = "127.0.0.1"
    claims: dict[str, Any] = field(default_factory=lambda: {"preferred_username": "anna", "groups": ["rmq-admins"]})
    document: dict[str, Any] = field(default_factory=dict)
    sign: str = "key"
    has_id_token: bool = True
    asked: list[str] = field(default_factory=list)
    codes: dict[str, dict[str, str]] = field(default_factory=dict)

    @property
    def issuer(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def settings(self) -> dict[str, Any]:
        roles = {"admin": ["rmq-admins"], "viewer": ["staff"]}
        return {"issuer": self.issuer, "clientId": CLIENT, "clientSecret": SECRET, "roles": roles, "label": "Acme"}

    def log_in(self, address: str) -> dict[str, str]:
        """Log in like a person on the login page, and return the parameters of the browser's redirect."""
        asked = dict(parse_qsl(urlsplit(address).query))
        assert (asked["response_type"], asked["client_id"], asked["code_challenge_method"]) == ("code", CLIENT, "S256")
        assert "openid" in asked["scope"].split()
        code = f"code-{len(self.codes)}"
        self.codes[code] = asked
        return {"code": code, "state": asked["state"]}

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            method, path, _ = head.split(" ", 2)
            headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head.split("\r\n"))}
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            self.asked.append(path)
            status, values = self.page(method, path, headers, body)
            text = json.dumps(values).encode()
            length = f"content-type: application/json\r\ncontent-length: {len(text)}\r\nconnection: close"
            if status.startswith("303"):
                length += f"\r\nlocation: {values}"
            writer.write(f"HTTP/1.1 {status}\r\n{length}\r\n\r\n".encode() + text)
            await writer.drain()
        finally:
            writer.close()

    def page(self, method: str, path: str, headers: dict[str, str], body: bytes) -> tuple[str, Any]:
        match method, path:
            case "GET", "/.well-known/openid-configuration":
                names = {"authorization_endpoint": "login", "token_endpoint": "token", "jwks_uri": "keys"}
                found = {name: f"{self.issuer}/{place}" for name, place in names.items()}
                return "200 OK", {
                    "issuer": self.issuer,
                    "end_session_endpoint": f"{self.issuer}/leave",
                } | found | self.document
            case "GET", login if login.startswith("/login?"):
                brought = self.log_in(login)
                return "303 See Other", f"{self.codes[brought['code']]['redirect_uri']}?{urlencode(brought)}"
            case "GET", "/keys":
                return "200 OK", KeySet([KEY]).as_dict(private=False)
            case "POST", "/token":
                given = {name: values[0] for name, values in parse_qs(body.decode()).items()}
                asked = self.codes.pop(given["code"], None)
                basic = base64.b64encode(f"{CLIENT}:{SECRET}".encode()).decode()
                challenge = base64.urlsafe_b64encode(hashlib.sha256(given["code_verifier"].encode()).digest())
                if (
                    asked is None
                    or headers.get("authorization") != f"Basic {basic}"
                    or challenge.rstrip(b"=").decode() != asked["code_challenge"]
                    or given["redirect_uri"] != asked["redirect_uri"]
                ):
                    return "400 Bad Request", {"error": "invalid_grant"}
                token = {"access_token": "access", "token_type": "Bearer"}
                return "200 OK", token | ({"id_token": self.id_token(asked)} if self.has_id_token else {})
        return "404 Not Found", {}

    def id_token(self, asked: dict[str, str]) -> str:
        now = SYSTEM_CLOCK.now_ms() // 1000
        claims = {"iss": self.issuer, "sub": "7", "aud": CLIENT, "iat": now, "exp": now + 300, "nonce": asked["nonce"]}
        claims = {name: value for name, value in (claims | self.claims).items() if value is not None}
        if self.sign == "none":
            parts = ({"alg": "none", "typ": "JWT"}, claims)
            return (
                ".".join(base64.urlsafe_b64encode(json.dumps(one).encode()).rstrip(b"=").decode() for one in parts)
                + "."
            )
        if self.sign == "secret":  # the public key, which everybody has, as the shared secret of HS256
            header = base64.urlsafe_b64encode(b'{"alg":"HS256","kid":"one"}').rstrip(b"=")
            payload = base64.urlsafe_b64encode(json.dumps(claims).encode()).rstrip(b"=")
            import hmac

            signed = hmac.digest(KEY.as_pem(private=False), header + b"." + payload, "sha256")
            return (header + b"." + payload + b"." + base64.urlsafe_b64encode(signed).rstrip(b"=")).decode()
        key = KEY if self.sign == "key" else OTHER_KEY
        return jwt.encode({"alg": "RS256", "kid": "one"}, claims, key)


@asynccontextmanager
async def providing(host: str = "127.0.0.1") -> AsyncIterator[Provider]:
    provider = Provider(host=host)
    server = await asyncio.start_server(provider.answer, "127.0.0.1", 0)
    provider.port = server.sockets[0].getsockname()[1]
    try:
        yield provider
    finally:
        server.close()
        await server.wait_closed()

"""Callers of a service over HTTP, who sign as real clients do."""

import base64
import json
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import aiohttp
from yarl import URL

from pysync.auth import issuing, signing
from pysync.auth.certificates import Certificate
from pysync.auth.identity_keys import IdentityKeys
from pysync.clock import wall_clock_ms

PROTOCOL = Path(__file__).parents[1] / "protocol.json"
ISSUER = IdentityKeys.from_private(b"\x11" * 32, b"\x31" * 32)
SUBJECT = IdentityKeys.from_private(b"\x22" * 32, b"\x42" * 32)
STRANGER = IdentityKeys.from_private(b"\x77" * 32, b"\x78" * 32)


@dataclass
class Reply:
    """An answer, read."""

    status: int
    headers: Any
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> tuple[int, str]:
        return self.status, self.json["error"]


@dataclass
class Browser:
    """Sends requests to one service, as they are given."""

    base: str
    session: aiohttp.ClientSession

    async def request(
        self, method: str, target: str, body: object = None, headers: dict[str, str] | None = None
    ) -> Reply:
        """`target` goes on the wire as it is, and so do bytes; any other `body` goes as JSON."""
        sent = dict(headers or {})
        if body is not None and "Content-Type" not in sent:
            sent["Content-Type"] = "application/json"
        data = body if isinstance(body, bytes | BytesIO | None) else json.dumps(body).encode()
        url = URL(self.base + target, encoded=True)
        async with self.session.request(method, url, data=data, headers=sent) as answer:
            return Reply(answer.status, answer.headers, await answer.read())

    async def pull(self, key: str, headers: dict[str, str] | None = None) -> Reply:
        return await self.request("GET", f"/pull/{key}", headers=headers)

    async def push(
        self, key: str, data: object, base: str | None = None, headers: dict[str, str] | None = None
    ) -> Reply:
        return await self.request("POST", f"/push/{key}", {"data": data, "baseHash": base}, headers)


@dataclass
class Signed(Browser):
    """Signs its requests with `keys` under `certificate`; `tamper` may change the headers before they go."""

    keys: IdentityKeys
    certificate: Certificate
    presenter: bool = False
    prefix: str = ""
    tamper: Callable[[dict[str, str]], None] = field(default=lambda headers: None)
    ts_ms: int | None = None
    nonce: bytes | None = None

    async def request(
        self, method: str, target: str, body: object = None, headers: dict[str, str] | None = None
    ) -> Reply:
        data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        merged = {**self.headers(method, target, data), **(headers or {})}
        self.tamper(merged)
        return await super().request(method, target, data if body is not None else None, merged)

    def headers(self, method: str, target: str, body: bytes) -> dict[str, str]:
        signed = signing.sign_request(
            self.keys,
            method,
            self.prefix + target,
            body,
            signing.canonical_host(self.base),
            self.ts_ms or wall_clock_ms(),
            self.nonce or os.urandom(16),
        )
        if self.presenter:
            signed["X-Starfish-Pub"] = self.keys.ed_pub
        return {"Authorization": self.certificate.authorization, **signed}


def minted_at() -> dict[str, Any]:
    """Clock and nonce for a certificate minted now."""
    return {"now_s": wall_clock_ms() // 1000, "nonce": os.urandom(16)}


def root_device(keys: IdentityKeys, **options: Any) -> Certificate:
    """The certificate of a root's own first device."""
    return issuing.issue_device_certificate(keys, keys.ed_pub, keys.kem_pub, **minted_at(), **options)


def encoded(members: dict[str, Any]) -> str:
    """An Authorization header that presents `members` as a certificate, whatever they are."""
    return "Cap " + base64.b64encode(json.dumps(members, separators=(",", ":")).encode()).decode()


Start = Callable[..., Awaitable[str]]

"""Pull and push documents over HTTP, signed, and repeated where that is safe (clients-and-crypto 6)."""

import asyncio
import os
import random as random_module
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self, TypeVar
from urllib.parse import quote, urlsplit

import aiohttp
import orjson
from yarl import URL

from pysync import signing, wire
from pysync._core import decode_push
from pysync.caps import Certificate, RevocationList
from pysync.errors import PysyncError, RateLimited, Unavailable, from_answer
from pysync.signing import Signer

T = TypeVar("T")


class Unreachable(ConnectionError):
    """No answer of a server came: the connection failed or timed out, or what answered is no such server. A
    push that ends so may have been applied."""


@dataclass(frozen=True, slots=True)
class PullResult:
    """A document as the server holds it: `hash` is `""` and `data` empty where nothing is stored.
    `timestamp_ms` is the time of the pull. `keyring` is None where it was not asked for, is not stored, or
    may not be read."""

    data: dict[str, Any]
    hash: str
    timestamp_ms: int
    author_pubkey: str | None = None
    author_signature: str | None = None
    keyring: "PullResult | None" = None


@dataclass(frozen=True, slots=True)
class PushResult:
    """A push that was applied: `hash` is the base of the next one."""

    hash: str
    timestamp_ms: int


@dataclass(frozen=True, slots=True)
class Backoff:
    """How often a request is tried, and how long to wait between: `first_s` doubling up to `most_s`, less up
    to a half at random. A server that asks for a longer wait than `most_s` is not asked again."""

    attempts: int = 4
    first_s: float = 0.25
    most_s: float = 10.0

    def wait_s(self, attempt: int, retry_after_s: float, chance: float) -> float | None:
        """The wait after the failed `attempt` (from 1), None to give up. `chance` is in [0, 1)."""
        if attempt >= self.attempts or retry_after_s > self.most_s:
            return None
        wait_s: float = min(self.first_s * 2 ** (attempt - 1), self.most_s)
        return max(wait_s * (1 - chance / 2), retry_after_s)


class Client:
    """One server, and who speaks to it: a key with its certificate, an admin token, or nobody.

    An async context manager; usable by many tasks at once. Every attempt is signed afresh. Pulls and pushes
    are repeated when the connection fails and on 429 and 503; a push carries an Idempotency-Key, so that the
    server applies it once. Refusals are the classes of `pysync.errors`, and `Unreachable` where none came.
    """

    def __init__(
        self,
        base_url: str,
        *,
        keys: Signer | None = None,
        certificate: Certificate | None = None,
        admin_token: str | None = None,
        namespace: str | None = None,
        session: aiohttp.ClientSession | None = None,
        timeout_s: float = 30.0,
        backoff: Backoff = Backoff(),
        now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
        random: Callable[[int], bytes] = os.urandom,
        chance: Callable[[], float] = random_module.random,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`base_url` is where `/pull` and `/push` begin; with a `namespace`, whose paths begin with `/v1/`,
        it holds the origin alone. A given `session` stays open when the client closes. Raises ValueError for
        what can never work."""
        if (keys is None) != (certificate is None):
            raise ValueError("keys and certificate belong together")
        if keys and certificate and certificate.sub not in ("", keys.ed_pub):
            raise ValueError("the certificate is for another key")
        if keys and admin_token:
            raise ValueError("a certificate and an admin token exclude each other")
        self._base, self._host = _base(base_url)
        self._keys = keys
        self._certificate = certificate
        self._admin_token = admin_token
        self._prefix = f"/v1/{namespace}" if namespace else ""
        self._session = session
        self._owns_session = session is None
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._backoff = backoff
        self._now_ms = now_ms
        self._random = random
        self._chance = chance
        self._sleep = sleep

    async def __aenter__(self) -> Self:
        if self._session is None:
            self._session = aiohttp.ClientSession()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections, unless the session is the caller's."""
        if self._session is not None and self._owns_session:
            await self._session.close()
            self._session = None

    async def pull(self, key: str, *, with_keyring: bool = False) -> PullResult:
        """The document at `key`, empty where nothing is stored."""
        query = "?withKeyring=1" if with_keyring else ""
        return await self._repeat("GET", self._target("pull", key) + query, _pulled)

    async def push(
        self,
        key: str,
        data: Mapping[str, Any],
        base_hash: str | None = None,
        *,
        idempotency_key: str | None = None,
        sign_author: bool = False,
    ) -> PushResult:
        """Replace the document at `key`, if it is still at `base_hash`; None: if nothing is stored there.

        Raises Conflict, with the `current_hash`, otherwise. `idempotency_key` is made up unless given: give
        one to repeat a push across restarts of the caller. `sign_author` proves to readers who wrote it.
        """
        body = orjson.dumps({"data": data, "baseHash": base_hash})
        if sign_author:
            body = orjson.dumps({"data": data, "baseHash": base_hash, **self._author_proof(key, body)})
        headers = {
            "Content-Type": "application/json",
            wire.HEADER_IDEMPOTENCY_KEY: idempotency_key or self._random(16).hex(),
        }
        return await self._repeat("POST", self._target("push", key), _pushed, body, headers)

    async def revoke(self, revocations: RevocationList) -> int:
        """Publish a revocation list and return its generation. Raises StaleGeneration where the server knows
        this one or a later one; a lost answer is not retried, for that reason."""
        headers = {"Content-Type": "application/json"}
        return await self._attempt(
            "POST", "/revocations", lambda answer: int(answer["generation"]), revocations.text, headers
        )

    async def health(self) -> dict[str, Any]:
        """What the server says of itself. Unsigned, and tried once."""
        return await self._attempt("GET", "/health", lambda answer: answer)

    def _target(self, action: str, key: str) -> str:
        return f"{self._prefix}/{action}/{quote(_document_key(key), safe='/:@')}"

    def _author_proof(self, key: str, body: bytes) -> dict[str, str]:
        if self._keys is None:
            raise ValueError("an author proof needs keys")
        data = decode_push(body).data
        return signing.sign_author(self._keys, signing.DOCUMENT_AUTHOR, _document_key(key), data)

    async def _repeat(
        self,
        method: str,
        target: str,
        decode: Callable[[dict[str, Any]], T],
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
    ) -> T:
        attempt = 0
        while True:
            attempt += 1
            try:
                return await self._attempt(method, target, decode, body, headers)
            except (Unreachable, RateLimited, Unavailable) as error:
                wait_s = self._backoff.wait_s(attempt, _retry_after_s(error), self._chance())
                if wait_s is None:
                    raise
            await self._sleep(wait_s)

    async def _attempt(
        self,
        method: str,
        target: str,
        decode: Callable[[dict[str, Any]], T],
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
    ) -> T:
        if self._session is None:
            raise RuntimeError("the client is not open: use `async with Client(...)`")

        async def sign(
            request: aiohttp.ClientRequest, send: aiohttp.ClientHandlerType
        ) -> aiohttp.ClientResponse:
            # Here, because aiohttp sends a GET again by itself when a kept connection turns out to be closed.
            request.headers.update(self._credentials(method, target, body))
            return await send(request)

        try:
            async with self._session.request(
                method,
                URL(self._base + target, encoded=True),
                data=body or None,
                headers=headers,
                middlewares=(sign,),
                timeout=self._timeout,
                allow_redirects=False,  # a signature is for one place
            ) as response:
                status, answer, told = response.status, await response.read(), response.headers
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Unreachable(f"{self._base}: {_failure(error)}") from error
        if status != 200:
            raise from_answer(status, _error_members(answer), told)
        try:
            return decode(_object(orjson.loads(answer)))
        except (ValueError, KeyError, TypeError) as error:
            raise Unreachable(f"{self._base}: the answer to {method} {target} is not understood") from error

    def _credentials(self, method: str, target: str, body: bytes) -> dict[str, str]:
        if self._admin_token:
            return {"Authorization": f"Bearer {self._admin_token}"}
        if self._keys is None or self._certificate is None:
            return {}
        headers = signing.sign_request(
            self._keys, method, target, body, self._host, self._now_ms(), self._random(16)
        )
        headers["Authorization"] = self._certificate.authorization
        if self._certificate.kind == "audience":
            headers[wire.HEADER_PUB] = self._keys.ed_pub
        return headers


def _base(base_url: str) -> tuple[str, str]:
    """The text that requests begin with, and the host they sign. The one is made of the other: what the
    connection names as Host must be what was signed."""
    host, url = signing.host_of(base_url), urlsplit(base_url)
    if not host or url.username is not None or url.query or url.fragment:
        raise ValueError(f"not the http or https address of a server: {base_url!r}")
    return f"{url.scheme}://{host}{url.path.rstrip('/')}", host


def _failure(error: Exception) -> str:
    if isinstance(error, aiohttp.ClientConnectorError):
        return "cannot connect"
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return str(error) or type(error).__name__


def _document_key(key: str) -> str:
    """The key of a document, also from the paths that other clients of the protocol take."""
    return key.removeprefix("/pull/").removeprefix("/push/")


def _retry_after_s(error: Exception) -> float:
    text = error.headers.get("Retry-After", "") if isinstance(error, PysyncError) else ""
    return float(text) if text.isdecimal() else 0.0


def _error_members(answer: bytes) -> dict[str, Any]:
    """The members of an error body; none where a proxy answered in another language."""
    try:
        return _object(orjson.loads(answer))
    except (ValueError, TypeError):
        return {}


def _object(answer: Any) -> dict[str, Any]:
    if not isinstance(answer, dict):
        raise TypeError("not a JSON object")
    return answer


def _pulled(answer: dict[str, Any]) -> PullResult:
    keyring = answer.get("keyring")
    return PullResult(
        data=_object(answer["data"]),
        hash=answer["hash"],
        timestamp_ms=answer["timestamp"],
        author_pubkey=answer.get("authorPubkey"),
        author_signature=answer.get("authorSignature"),
        keyring=None if keyring is None else _pulled(_object(keyring)),
    )


def _pushed(answer: dict[str, Any]) -> PushResult:
    return PushResult(hash=answer["hash"], timestamp_ms=answer["timestamp"])

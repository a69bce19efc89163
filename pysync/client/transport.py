"""HTTP requests of the client: signed, and retried if that is safe."""

import asyncio
import errno
import os
import random as random_module
import ssl
import time
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, Self, TypeVar
from urllib.parse import quote, urlsplit

import aiohttp
import orjson
from yarl import URL

from pysync import protocol
from pysync.auth import issuing, signing
from pysync.auth.certificates import Certificate, user_id
from pysync.auth.signing import Signer
from pysync.client.models import as_object
from pysync.errors import (
    CoordinatorUnavailable,
    Forbidden,
    PayloadTooLarge,
    PysyncError,
    RateLimited,
    StoreUnavailable,
    Unauthorized,
    Unavailable,
    from_response,
)
from pysync.protocol import JSON_TYPE

T = TypeVar("T")

RENEW_BEFORE_S: Final = 24 * 3600
"""Seconds before the expiry of its own certificate at which a client replaces it, since clocks differ."""


SILENCE_S: Final = 2.0
"""Seconds without an answer after which `on_silence` is called."""


class Unreachable(ConnectionError):
    """There was no response: the connection failed or timed out, or the responder does not speak the
    protocol. A push that ends so may have been applied."""


RETRYABLE: Final = (Unreachable, RateLimited, Unavailable)
"""Errors after which a request is repeated."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """The number of attempts, and the wait between them: `initial_s`, doubling up to `max_s`, less up to half
    at random. A request is not repeated if the server asks for a longer wait than `max_s`."""

    attempts: int = 4
    initial_s: float = 0.25
    max_s: float = 10.0

    def wait_s(self, attempt: int, retry_after_s: float, jitter: float) -> float | None:
        """Return the wait after the failed `attempt` (counted from 1); None to give up. `jitter` is in [0,
        1)."""
        if attempt >= self.attempts or retry_after_s > self.max_s:
            return None
        return self.pause_s(attempt, retry_after_s, jitter)

    def pause_s(self, attempt: int, retry_after_s: float, jitter: float) -> float:
        """Return the wait after the failed `attempt` (counted from 1) of a caller that never gives up."""
        wait_s: float = min(self.initial_s * 2 ** min(attempt - 1, 32), self.max_s)
        return max(wait_s * (1 - jitter / 2), retry_after_s)


class Transport:
    """Signed HTTP requests to one server, repeated if that is safe. An async context manager, usable by many
    tasks at once."""

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
        backoff: RetryPolicy = RetryPolicy(),
        now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
        random: Callable[[int], bytes] = os.urandom,
        jitter: Callable[[], float] = random_module.random,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        on_retry: Callable[[Exception, float], None] = lambda error, wait_s: None,
        on_silence: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        """`base_url` is the URL before `/pull` and `/push`; with a `namespace`, whose paths begin with
        `/v1/`, it is the origin alone. For `keys` without a `certificate` the client issues a device
        certificate, and renews it before it expires. A given `session` stays open when the client closes.
        `on_retry` is called with the error and the seconds to wait before each repeated request, and
        `on_silence` with `SILENCE_S` for each that has no answer by then, except transfers of files. Raises
        ValueError for combinations that can never work."""
        self._on_retry = on_retry
        self._on_silence = on_silence
        if keys is None and certificate is not None:
            raise ValueError("a certificate needs keys")
        own_kem = getattr(keys, "kem_pub", "")
        if keys is not None and certificate is None and not own_kem:
            raise ValueError("keys that only sign need a certificate: theirs has no X25519 key to name")
        if keys and certificate and certificate.sub not in ("", keys.ed_pub):
            raise ValueError("the certificate is for another key")
        if keys and admin_token:
            raise ValueError("a certificate and an admin token exclude each other")
        self._base, self._host = _parse_base_url(base_url)
        self._keys = keys
        self._certificate = certificate
        self._own_kem: str = own_kem if certificate is None else ""
        self._admin_token = admin_token
        self._prefix = f"/v1/{namespace}" if namespace else ""
        self._session = session
        self._streams = session
        self._owns_session = session is None
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._file_timeout = aiohttp.ClientTimeout(total=None, connect=timeout_s, sock_read=timeout_s)
        self.backoff = backoff
        """How often, and after which waits, requests are repeated."""
        self._now_ms = now_ms
        self._random = random
        self._jitter = jitter
        self._sleep = sleep

    @property
    def address(self) -> str:
        """The URL at which `/pull` and `/push` begin, with the namespace."""
        return self._base + self._prefix

    @property
    def identity(self) -> str:
        """The user id as which the server knows the caller; `""` for an anonymous one, `admin` for the holder
        of the admin token."""
        if self._keys is None:
            return "admin" if self._admin_token else ""
        known = self._certificate
        is_device = known is not None and known.kind == "device"
        return known.iss_user_id if known is not None and is_device else user_id(self._keys.ed_pub)

    @property
    def author(self) -> str | None:
        """The public key that signs; None without keys."""
        return None if self._keys is None else self._keys.ed_pub

    @property
    def certificate(self) -> Certificate | None:
        """The certificate of the next request. Set another one when it has expired."""
        return self._certificate

    @certificate.setter
    def certificate(self, certificate: Certificate) -> None:
        if self._keys is None or certificate.sub not in ("", self._keys.ed_pub):
            raise ValueError("the certificate is for another key")
        self._certificate, self._own_kem = certificate, ""

    async def __aenter__(self) -> Self:
        if self._session is None:
            self._session = aiohttp.ClientSession()
            # Streams stay open: a hundred of them in one pool with requests would keep those waiting.
            self._streams = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections, unless the caller passed the session."""
        if not self._owns_session:
            return
        sessions = (self._session, self._streams)
        self._session = self._streams = None  # at once: a watch that ends now must not connect again
        for session in sessions:
            if session is not None:
                await session.close()

    async def _request(
        self,
        method: str,
        target: str,
        decode: Callable[[dict[str, Any]], T],
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
        *,
        anonymous: bool = False,
        retryable: tuple[type[Exception], ...] = RETRYABLE,
    ) -> T:
        async def attempt() -> T:
            silence = asyncio.get_running_loop().call_later(SILENCE_S, self._on_silence, SILENCE_S)
            try:
                async with self._send(
                    self._session, method, target, body, headers, self._timeout, anonymous=anonymous
                ) as response:
                    return await self._read(response, decode)
            finally:
                silence.cancel()

        return await self._retry(attempt, retryable)

    async def _retry(self, attempt: Callable[[], Awaitable[T]], retryable: tuple[type[Exception], ...]) -> T:
        """Return the result of `attempt`, repeating it while it raises one of `retryable`."""
        failures = 0
        while True:
            try:
                return await attempt()
            except retryable as error:
                failures += 1
                await self._wait(failures, error)

    async def _wait(self, failures: int, error: Exception) -> None:
        """Wait before the next attempt, or raise `error` if there is none."""
        wait_s = self.backoff.wait_s(failures, retry_after_s(error), self._jitter())
        if wait_s is None:
            raise error
        self._on_retry(error, wait_s)
        await self._sleep(wait_s)

    async def _read(self, response: aiohttp.ClientResponse, decode: Callable[[dict[str, Any]], T]) -> T:
        """Decode a JSON response. Raises the error for any status but 200, ValueError for a file, which is
        not read, and Unreachable for a response that is not understood."""
        if response.status == 200 and response.content_type != JSON_TYPE and "ETag" in response.headers:
            media_type = response.content_type
            raise ValueError(f"a file of {media_type} is there: `pull_blob` or `pull --out` gets it")
        body = await response.read()
        if response.status != 200:
            raise response_error(response, body)
        try:
            return decode(as_object(orjson.loads(body)))
        except (ValueError, KeyError, TypeError) as error:
            requested = f"{response.method} {response.url.raw_path_qs}"
            raise Unreachable(f"{self._base}: the answer to {requested} is not understood") from error

    @asynccontextmanager
    async def _stream(
        self, target: str, headers: Mapping[str, str], idle_s: float
    ) -> AsyncIterator[aiohttp.StreamReader]:
        """Yield the bytes of the event stream at `target` as they arrive; leaving closes the connection.
        Raises the error for any status but 200, and Unreachable for another kind of response, or after
        `idle_s` without data."""
        limits = aiohttp.ClientTimeout(total=None, connect=self._timeout.total, sock_read=idle_s)
        async with self._send(self._streams, "GET", target, b"", headers, limits) as response:
            if response.status != 200:
                raise response_error(response, await response.read())
            if response.content_type != "text/event-stream":
                raise Unreachable(f"{self._base}: the answer to GET {target} is not understood")
            yield response.content

    @asynccontextmanager
    async def _send(
        self,
        session: aiohttp.ClientSession | None,
        method: str,
        target: str,
        body: bytes,
        headers: Mapping[str, str] | None,
        limits: aiohttp.ClientTimeout,
        *,
        anonymous: bool = False,
        upload: AsyncIterable[bytes] | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send one request and return the response, its body unread. The signature covers `body`, also if an
        `upload` is sent instead. Raises Unreachable if there is no response, or if reading it fails."""
        if session is None:
            raise RuntimeError("the client is not open: use `async with Client(...)`")

        async def sign(
            request: aiohttp.ClientRequest, send: aiohttp.ClientHandlerType
        ) -> aiohttp.ClientResponse:
            # Here, because aiohttp sends a GET again by itself when a kept connection turns out to be closed.
            if not anonymous:
                request.headers.update(self._credentials(method, target, body))
            return await send(request)

        try:
            async with session.request(
                method,
                URL(self._base + target, encoded=True),
                data=body or None if upload is None else upload,
                headers=headers,
                middlewares=(sign,),
                timeout=limits,
                allow_redirects=False,  # a signature is for one place
            ) as response:
                yield response
        except Unreachable:
            raise
        except aiohttp.ClientConnectorError as error:
            raise Unreachable(_connection_problem(error)) from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Unreachable(f"{self._base}: {_describe(error)}") from error

    def _target(self, action: str, key: str) -> str:
        return f"{self._prefix}/{action}/{quote(document_key(key), safe='/:@')}"

    def _write_headers(self, idempotency_key: str | None, content_type: str = JSON_TYPE) -> dict[str, str]:
        return {
            "Content-Type": content_type,
            protocol.HEADER_IDEMPOTENCY_KEY: idempotency_key or self._random(16).hex(),
        }

    def _credentials(self, method: str, target: str, body: bytes) -> dict[str, str]:
        if self._admin_token:
            return {"Authorization": f"Bearer {self._admin_token}"}
        if self._keys is None:
            return {}
        certificate = self._valid_certificate(self._keys)
        headers = signing.sign_request(
            self._keys, method, target, body, self._host, self._now_ms(), self._random(16)
        )
        headers["Authorization"] = certificate.authorization
        if certificate.kind == "audience":
            headers[protocol.HEADER_PUB] = self._keys.ed_pub
        return headers

    def _valid_certificate(self, keys: Signer) -> Certificate:
        """Return the given certificate, else a current one that the keys have made for themselves."""
        now_s = self._now_ms() // 1000
        known = self._certificate
        if known is None or (self._own_kem and not known.nbf <= now_s < known.exp - RENEW_BEFORE_S):
            known = self._certificate = issuing.issue_device_certificate(
                keys, keys.ed_pub, self._own_kem, now_s=now_s, nonce=self._random(16)
            )
        return known


def document_key(key: str) -> str:
    """Return the key of a document, also from the paths that other clients of the protocol accept."""
    return key.removeprefix("/pull/").removeprefix("/push/")


def _parse_base_url(base_url: str) -> tuple[str, str]:
    """Return the text with which requests begin, and the host that they sign. Both derive from one parsed
    URL, because the Host header must equal the signed host."""
    host, url = signing.canonical_host(base_url), urlsplit(base_url)
    if not host or url.username is not None or url.query or url.fragment:
        raise ValueError(f"not the http or https address of a server: {base_url!r}")
    return f"{url.scheme}://{host}{url.path.rstrip('/')}", host


def _connection_problem(error: aiohttp.ClientConnectorError) -> str:
    """Return why there is no connection, and what to do about it."""
    cause, advice = error.os_error, ""
    reason = cause.strerror or str(cause)
    if isinstance(cause, ssl.SSLCertVerificationError):
        reason = f"its certificate is not trusted ({cause.verify_message})"
        advice = "; renew it, or name the file of its authority in SSL_CERT_FILE"
    elif isinstance(cause, ssl.SSLError):
        reason = f"TLS failed ({cause.reason or cause})"
        advice = "; check that the server speaks https there"
    elif isinstance(error, aiohttp.ClientConnectorDNSError):
        reason = f"the host is not known ({reason})"
        advice = "; check its name, and the network"
    elif cause.errno == errno.ECONNREFUSED:
        reason = "the connection was refused"
        advice = "; check the address, and that the server runs there"
    elif cause.errno:
        reason = os.strerror(cause.errno)
    return f"cannot connect to {error.host} port {error.port}: {reason}{advice}"


def _describe(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return str(error) or type(error).__name__


def retry_after_s(error: Exception) -> float:
    """Return the seconds to wait that the error asks for; 0 if it does not say."""
    text = error.headers.get("Retry-After", "") if isinstance(error, PysyncError) else ""
    return float(text) if text.isdecimal() else 0.0


def response_error(response: aiohttp.ClientResponse, body: bytes) -> PysyncError:
    """Return the error that a response without success stands for. Its text says what to do, too; its
    `message` is that of the server."""
    try:
        members = as_object(orjson.loads(body))
    except (ValueError, TypeError):
        members = {}  # of a proxy, in another format
    error = from_response(response.status, members, response.headers)
    if advice := _advice(error, response.request_info.headers):
        error.args = (f"{error.message}: {advice}",)
    return error


def _advice(error: PysyncError, sent: Mapping[str, str]) -> str:
    """Return what the client knows about the `error` of a request with the headers `sent`."""
    match error:
        case RateLimited() if wait_s := retry_after_s(error):
            return f"try again in {wait_s:g} s"
        case PayloadTooLarge() if size := sent.get("Content-Length"):
            return f"{int(size):,} bytes are more than the collection accepts (its maxBodyBytes)"
        case PayloadTooLarge():
            return "the body has more bytes than the collection accepts (its maxBodyBytes)"
        case Unauthorized() if "Authorization" not in sent:
            return "the request has no credentials; add keys (--key FILE on the command line)"
        case Unauthorized() | Forbidden():
            return "the server's log has the reason if `server.logRefusals` is on"
        case StoreUnavailable():
            return "the server's store does not answer; its log has the cause"
        case CoordinatorUnavailable():
            return "the server's coordinator does not answer; its log has the cause"
    return ""

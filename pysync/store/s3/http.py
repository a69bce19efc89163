"""Signed requests to one bucket, sent over one session and retried if that can help.

aiobotocore could send all of them, but each takes six times as long; it is used for rare requests only.
"""

import asyncio
import io
import random
import re
import time
from collections.abc import AsyncIterable, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple
from urllib.parse import quote

import aiohttp
from aiohttp import ClientHandlerType, ClientRequest, ClientResponse
from yarl import URL

from pysync.errors import StoreUnavailable
from pysync.model import Observe, unobserved
from pysync.protocol import CHUNK_BYTES
from pysync.store.s3.credentials import S3Client, SignableRequest

MIN_BYTES_PER_S: Final = 262_144
"""Minimum transfer rate: it extends the timeout of a request with a long body."""
_MAX_WRITE_BYTES: Final = 1_048_576
"""aiohttp expects larger bodies as a stream."""

_TRANSIENT_STATUSES: Final = frozenset({429, 500, 502, 503, 504})
_TRANSIENT_CODES: Final = frozenset(
    {
        "SlowDown", "ServiceUnavailable", "InternalError", "Throttling", "ThrottlingException",
        "RequestLimitExceeded", "RequestTimeout", "IncompleteBody", "BadDigest", "XAmzContentSHA256Mismatch",
        "OperationAborted", "ConditionalRequestConflict",
    }
)  # fmt: skip
_NOT_EXECUTED_CODES: Final = _TRANSIENT_CODES - {"InternalError", "ServiceUnavailable"}
"""Error codes that guarantee that S3 has not executed the request."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Limits of retries: at most `max_attempts` attempts, none started later than `deadline_s` after the
    first. Pauses are random, up to 0.1 s, 0.2 s, 0.4 s, ..., so that clients that failed together do not
    retry together."""

    max_attempts: int = 5
    deadline_s: float = 10.0
    random: Callable[[], float] = random.random
    clock_s: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep


class RetryState:
    """The attempts of one request. The first has already started."""

    __slots__ = ("_begun_s", "_count", "_policy")

    def __init__(self, policy: RetryPolicy) -> None:
        self._policy = policy
        self._begun_s = policy.clock_s()
        self._count = 1

    async def next_attempt(self) -> bool:
        """Pause, and return True for another attempt; return False if the limits are reached."""
        policy = self._policy
        pause_s = policy.random() * 0.1 * 2 ** (self._count - 1)
        left_s = policy.deadline_s - (policy.clock_s() - self._begun_s)
        if self._count == policy.max_attempts or pause_s > left_s:
            return False
        self._count += 1
        await policy.sleep(pause_s)
        return True


class S3Response(NamedTuple):
    """A response with its body read."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def code(self) -> str:
        """S3's error code, `""` without one."""
        found = re.search(rb"<Code>([\w.]{1,64})</Code>", self.body[:4096])
        return found[1].decode() if found else ""

    @property
    def is_transient(self) -> bool:
        """True if a retry of the same request may succeed."""
        return self.status in _TRANSIENT_STATUSES or (self.status >= 400 and self.code in _TRANSIENT_CODES)

    @property
    def may_have_executed(self) -> bool:
        """True if S3 may have executed the request."""
        return self.status < 300 or (self.status >= 500 and self.code not in _NOT_EXECUTED_CODES)

    @property
    def is_precondition_failed(self) -> bool:
        """True if a condition was not met. AWS responds with 404 to `If-Match` if there is no object."""
        return self.status == 412 or (self.status == 404 and self.code == "NoSuchKey")


class S3Error(Exception):
    """S3 returned an error that the caller does not handle."""

    def __init__(self, response: S3Response) -> None:
        super().__init__(f"S3 answered {response.status} {response.code}".rstrip())
        self.response = response
        self.is_transient = response.is_transient
        self.is_precondition_failed = response.is_precondition_failed
        self.may_have_executed = response.may_have_executed


class S3ConnectionError(Exception):
    """The connection failed before a response was received."""

    is_transient = True
    is_precondition_failed = False

    def __init__(self, cause: BaseException, was_sent: bool) -> None:
        super().__init__(f"{type(cause).__name__}: {cause}")
        self.may_have_executed = was_sent


class _ResendPrevented(aiohttp.ClientError):
    """Prevents aiohttp from resending a request by itself: the caller must know that a write may already have
    been executed."""


@dataclass(slots=True)
class StreamedBody:
    """A body that is read while it is sent. `chunks()` restarts it for each attempt. `sha256` is hex."""

    size: int
    sha256: str
    chunks: Callable[[], AsyncIterable[bytes]]


@dataclass(slots=True)
class S3Request:
    """A request: `key` below the prefix, headers to sign, and a body. `query` is percent-encoded.
    `wants_body` decides by the headers of a successful response whether to read its body."""

    method: str
    key: str
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes | StreamedBody = b""
    query: str = ""
    wants_body: Callable[[Mapping[str, str]], bool] | None = None


class S3RequestSender:
    """Sends requests to the bucket of `account`, with keys below `root` (`""`, or with a trailing slash)."""

    def __init__(
        self,
        account: S3Client,
        root: str,
        timeout_ms: int,
        max_connections: int,
        retry_policy: RetryPolicy,
        observe: Observe = unobserved,
    ) -> None:
        self.root = root
        self._account = account
        self._retry_policy = retry_policy
        self._observe = observe
        self._timeout_s = timeout_ms / 1000
        self._timeout = aiohttp.ClientTimeout(total=self._timeout_s)
        self._stream_timeout = aiohttp.ClientTimeout(
            total=None, connect=self._timeout_s, sock_read=self._timeout_s
        )
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=max_connections),
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
            auto_decompress=False,
            read_bufsize=CHUNK_BYTES,
            middlewares=(_forbid_resend,),
        )

    def retry_state(self) -> RetryState:
        """Return the state for the attempts of a new request."""
        return RetryState(self._retry_policy)

    async def send(self, request: S3Request, *expected: int) -> S3Response:
        """Send `request`, with retries, and return the response: status 200, or one of `expected`. A 404
        means that the object does not exist. Raises StoreUnavailable for any other result."""
        attempts = self.retry_state()
        while True:
            try:
                return _check_status(request, await self.send_once(request), expected)
            except (S3ConnectionError, S3Error) as error:
                if not error.is_transient or not await attempts.next_attempt():
                    raise StoreUnavailable from error

    async def stream(self, request: S3Request, *expected: int) -> ClientResponse | S3Response:
        """Send as `send` does, but return a response of status 200 or 206 with its body unread. The caller
        closes it."""
        attempts = self.retry_state()
        while True:
            try:
                response = await self._begin(request, self._stream_timeout)
                if response.status in (200, 206):
                    return response
                return _check_status(request, await _read(response, None), expected)
            except (S3ConnectionError, S3Error) as error:
                if not error.is_transient or not await attempts.next_attempt():
                    raise StoreUnavailable from error

    async def send_once(self, request: S3Request) -> S3Response:
        """Send `request` once, and return the response with any status. Raises S3ConnectionError if none was
        received."""
        within = self._timeout
        size = request.body.size if isinstance(request.body, StreamedBody) else len(request.body)
        if size > MIN_BYTES_PER_S:
            within = aiohttp.ClientTimeout(total=self._timeout_s + size / MIN_BYTES_PER_S)
        return await _read(await self._begin(request, within), request.wants_body)

    async def close(self) -> None:
        """Close the connections."""
        await self._session.close()

    async def _begin(self, call: S3Request, within: aiohttp.ClientTimeout) -> ClientResponse:
        """Return the response up to its body, which the caller reads or closes."""
        url = f"{self._account.base}/{quote(self.root + call.key, safe='/-_.~')}"
        if call.query:
            url = f"{url}?{call.query}"
        body: bytes | io.BytesIO | AsyncIterable[bytes]
        if isinstance(call.body, StreamedBody):
            request = SignableRequest(call.method, url, call.headers, b"", call.body.sha256)
            body = call.body.chunks()
        else:
            request = SignableRequest(call.method, url, call.headers, call.body)
            body = call.body if len(call.body) <= _MAX_WRITE_BYTES else io.BytesIO(call.body)
        (await self._account.signer()).add_auth(request)
        if isinstance(call.body, StreamedBody):
            request.headers["Content-Length"] = str(call.body.size)
        since = time.monotonic()
        try:
            return await self._session.request(
                call.method,
                URL(url, encoded=True),
                headers=request.headers,
                data=body or None,
                timeout=within,
                allow_redirects=False,
            )
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise S3ConnectionError(error, was_sent=False) from error
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise S3ConnectionError(error, was_sent=True) from error
        finally:
            self._observe("pysync_store_seconds", time.monotonic() - since, call.method.lower())


async def _read(
    response: ClientResponse, wants_body: Callable[[Mapping[str, str]], bool] | None
) -> S3Response:
    try:
        # Reading a small body is cheaper than opening another connection.
        if (
            wants_body is not None
            and response.status == 200
            and (response.content_length or 0) > CHUNK_BYTES
            and not wants_body(response.headers)
        ):
            response.close()
            return S3Response(response.status, response.headers, b"")
        return S3Response(response.status, response.headers, await response.read())
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise S3ConnectionError(error, was_sent=True) from error
    finally:
        response.release()


def _check_status(request: S3Request, response: S3Response, statuses: tuple[int, ...]) -> S3Response:
    if response.status == 200:
        return response
    # Only S3 itself, not a proxy, may report that an object is missing. A HEAD response has no body.
    if response.status not in statuses or (
        response.status == 404 and request.method != "HEAD" and response.code != "NoSuchKey"
    ):
        raise S3Error(response)
    return response


async def _forbid_resend(request: ClientRequest, handler: ClientHandlerType) -> ClientResponse:
    try:
        return await handler(request)
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError):
        raise  # nothing was sent, and aiohttp does not retry
    except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError) as error:
        raise _ResendPrevented(str(error)) from error

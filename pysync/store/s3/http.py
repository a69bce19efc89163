"""Requests to one bucket: signed, sent over one session, and tried again where that can help.

aiobotocore would do for all of it, at six times the price of each; it stays where requests are rare.
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
from pysync.store.s3.credentials import Account, Request

SLOWEST_BYTES_PER_S: Final = 262_144
"""A long body may take as long as it does at this rate, beside the time that any request may take."""
READ_BYTES: Final = 262_144
_AT_ONCE_BYTES: Final = 1_048_576
"""aiohttp wants a body beyond that as a stream."""

_PASSING_STATUSES: Final = frozenset({429, 500, 502, 503, 504})
_PASSING_CODES: Final = frozenset(
    {
        "SlowDown", "ServiceUnavailable", "InternalError", "Throttling", "ThrottlingException",
        "RequestLimitExceeded", "RequestTimeout", "IncompleteBody", "BadDigest", "XAmzContentSHA256Mismatch",
        "OperationAborted", "ConditionalRequestConflict",
    }
)  # fmt: skip
_UNDONE_CODES: Final = _PASSING_CODES - {"InternalError", "ServiceUnavailable"}
"""With these S3 says that it has done nothing."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a request is tried: `tries` times at most, none begun later than `within_s` after the first.
    Between two it sleeps for a random time of up to 0.1 s, 0.2 s, 0.4 s, ..., so that clients who were
    refused together do not come back together."""

    tries: int = 5
    within_s: float = 10.0
    random: Callable[[], float] = random.random
    clock_s: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep


class Attempts:
    """The tries of one request, the first of which is under way."""

    __slots__ = ("_begun_s", "_count", "_patience")

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._begun_s = patience.clock_s()
        self._count = 1

    async def again(self) -> bool:
        """True when it is time for another, after a pause; False where enough have failed."""
        patience = self._patience
        pause_s = patience.random() * 0.1 * 2 ** (self._count - 1)
        left_s = patience.within_s - (patience.clock_s() - self._begun_s)
        if self._count == patience.tries or pause_s > left_s:
            return False
        self._count += 1
        await patience.sleep(pause_s)
        return True


class Answer(NamedTuple):
    """An answer, read."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def code(self) -> str:
        """S3's word for an error, `""` where none came."""
        found = re.search(rb"<Code>([\w.]{1,64})</Code>", self.body[:4096])
        return found[1].decode() if found else ""

    @property
    def is_passing(self) -> bool:
        """Whether the same request may be answered otherwise in a moment."""
        return self.status in _PASSING_STATUSES or (self.status >= 400 and self.code in _PASSING_CODES)

    @property
    def may_have_acted(self) -> bool:
        """Whether what was asked for may have been done."""
        return self.status < 300 or (self.status >= 500 and self.code not in _UNDONE_CODES)

    @property
    def is_mismatch(self) -> bool:
        """Whether a condition was not met. AWS says 404 where `If-Match` finds nothing."""
        return self.status == 412 or (self.status == 404 and self.code == "NoSuchKey")


class Refused(Exception):
    """S3 answered with an error that the caller has no use for."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(f"S3 answered {answer.status} {answer.code}".rstrip())
        self.answer = answer
        self.is_passing = answer.is_passing
        self.is_mismatch = answer.is_mismatch
        self.may_have_acted = answer.may_have_acted


class Broken(Exception):
    """No answer came."""

    is_passing = True
    is_mismatch = False

    def __init__(self, cause: BaseException, was_sent: bool) -> None:
        super().__init__(f"{type(cause).__name__}: {cause}")
        self.may_have_acted = was_sent


class _Resent(aiohttp.ClientError):
    """Keeps aiohttp from sending a request twice by itself: of a write that may have been done already the
    caller must know."""


@dataclass(slots=True)
class Upload:
    """A body that is read as it is sent: `chunks()` begins it anew for each try. `sha256` is hex."""

    size: int
    sha256: str
    chunks: Callable[[], AsyncIterable[bytes]]


@dataclass(slots=True)
class Call:
    """One request: `key` below the prefix, headers that are signed, and a body. `query` is percent-encoded.
    `is_wanted` says by the headers of a good answer whether its body is to be read."""

    method: str
    key: str
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes | Upload = b""
    query: str = ""
    is_wanted: Callable[[Mapping[str, str]], bool] | None = None


class Requests:
    """Sends calls to the bucket of `account`, keys being below `root` (`""`, or with a slash at its end)."""

    def __init__(
        self, account: Account, root: str, timeout_ms: int, max_connections: int, patience: Patience
    ) -> None:
        self.root = root
        self._account = account
        self._patience = patience
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
            read_bufsize=READ_BYTES,
            middlewares=(_once,),
        )

    def attempts(self) -> Attempts:
        return Attempts(self._patience)

    async def send(self, call: Call, *expected: int) -> Answer:
        """The answer to `call`, tried again where that can help: 200, or a status that is `expected`; 404
        means that there is no such object. Raises StoreUnavailable for anything else."""
        attempts = self.attempts()
        while True:
            try:
                return _expected(call, await self.once(call), expected)
            except (Broken, Refused) as error:
                if not error.is_passing or not await attempts.again():
                    raise StoreUnavailable from error

    async def stream(self, call: Call, *expected: int) -> ClientResponse | Answer:
        """As `send`; the answer of status 200 or 206 comes with its body not read, and the caller closes
        it."""
        attempts = self.attempts()
        while True:
            try:
                response = await self._begin(call, self._stream_timeout)
                if response.status in (200, 206):
                    return response
                return _expected(call, await _read(response, None), expected)
            except (Broken, Refused) as error:
                if not error.is_passing or not await attempts.again():
                    raise StoreUnavailable from error

    async def once(self, call: Call) -> Answer:
        """The answer to `call`, whatever it is, sent once. Raises Broken where none came."""
        within = self._timeout
        size = call.body.size if isinstance(call.body, Upload) else len(call.body)
        if size > SLOWEST_BYTES_PER_S:
            within = aiohttp.ClientTimeout(total=self._timeout_s + size / SLOWEST_BYTES_PER_S)
        return await _read(await self._begin(call, within), call.is_wanted)

    async def close(self) -> None:
        await self._session.close()

    async def _begin(self, call: Call, within: aiohttp.ClientTimeout) -> ClientResponse:
        """The answer up to its body, which is still to be read or closed."""
        url = f"{self._account.base}/{quote(self.root + call.key, safe='/-_.~')}"
        if call.query:
            url = f"{url}?{call.query}"
        body: bytes | io.BytesIO | AsyncIterable[bytes]
        if isinstance(call.body, Upload):
            request = Request(call.method, url, call.headers, b"", call.body.sha256)
            body = call.body.chunks()
        else:
            request = Request(call.method, url, call.headers, call.body)
            body = call.body if len(call.body) <= _AT_ONCE_BYTES else io.BytesIO(call.body)
        (await self._account.signer()).add_auth(request)
        if isinstance(call.body, Upload):
            request.headers["Content-Length"] = str(call.body.size)
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
            raise Broken(error, was_sent=False) from error
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise Broken(error, was_sent=True) from error


async def _read(response: ClientResponse, is_wanted: Callable[[Mapping[str, str]], bool] | None) -> Answer:
    try:
        # A small body costs less to read than another connection does.
        if (
            is_wanted is not None
            and response.status == 200
            and (response.content_length or 0) > READ_BYTES
            and not is_wanted(response.headers)
        ):
            response.close()
            return Answer(response.status, response.headers, b"")
        return Answer(response.status, response.headers, await response.read())
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise Broken(error, was_sent=True) from error
    finally:
        response.release()


def _expected(call: Call, answer: Answer, statuses: tuple[int, ...]) -> Answer:
    if answer.status == 200:
        return answer
    # That an object is missing is S3's to say, and not any server's on the way; a HEAD has no body.
    if answer.status not in statuses or (
        answer.status == 404 and call.method != "HEAD" and answer.code != "NoSuchKey"
    ):
        raise Refused(answer)
    return answer


async def _once(request: ClientRequest, handler: ClientHandlerType) -> ClientResponse:
    try:
        return await handler(request)
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError):
        raise  # nothing was sent, and aiohttp does not try again
    except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError) as error:
        raise _Resent(str(error)) from error

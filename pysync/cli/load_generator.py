"""A load generator for HTTP with little overhead: raw connections, and nothing beside them.

Every request is made, and signed, before the clock starts. Of an answer only the status and the length are
read. Each connection has one request under way and sends the next as soon as the last is answered.
"""

import asyncio
import os
import re
import ssl
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final, cast
from urllib.parse import urlsplit

from pysync import protocol
from pysync.auth import issuing, signing
from pysync.auth.certificates import Certificate
from pysync.auth.identity_keys import IdentityKeys
from pysync.protocol import JSON_TYPE

CONNECTIONS: Final = 32
_CONTENT_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)\r\n", re.IGNORECASE)
_WORDS: Final = "Sow the peas, turn the compost, mend the gate before the frost comes back. "


class Rejected(Exception):
    """The server answered `status`, 401 or 403, where another one was expected. No request was sent after."""

    def __init__(self, status: int) -> None:
        super().__init__(f"the server answered {status}")
        self.status = status


class RequestBuilder:
    """Makes the bytes of requests to the server at `base_url`, in the name of `keys` under `certificate`; by
    default of a device of its own.

    `tag` is in the name of every document, so that two runs on one server never meet. A signed request is
    good for one use within 300 seconds (docs/reference/protocol.md#replay-protection).
    """

    def __init__(
        self, base_url: str, keys: IdentityKeys | None = None, certificate: Certificate | None = None
    ) -> None:
        url = urlsplit(base_url)
        self.tag = os.urandom(6).hex()
        self._mount = url.path.rstrip("/")
        self._netloc = url.netloc
        self._host_header = f"Host: {url.netloc}\r\n"
        self._signed_host = signing.canonical_host(base_url)
        self._keys = keys or IdentityKeys.generate()
        if certificate is None:
            now_s, nonce = int(time.time()), os.urandom(16)
            certificate = issuing.issue_device_certificate(
                self._keys, self._keys.ed_pub, self._keys.kem_pub, now_s=now_s, nonce=nonce
            )
        is_device = certificate.kind == "device"
        self.identity = certificate.iss_user_id if is_device else self._keys.user_id
        self._lines = f"Authorization: {certificate.authorization}\r\n"
        if certificate.kind == "audience":
            self._lines += f"{protocol.HEADER_PUB}: {self._keys.ed_pub}\r\n"

    def request(
        self, path: str, body: bytes | None = None, headers: str = "", content_type: str = JSON_TYPE
    ) -> bytes:
        """A GET, or with a body a POST of it. `headers` are lines that end in CRLF."""
        method = "GET" if body is None else "POST"
        if body is not None:
            headers += f"Content-Type: {content_type}\r\nContent-Length: {len(body)}\r\n"
        head = f"{method} {self._mount}{path} HTTP/1.1\r\n{self._host_header}{headers}\r\n"
        return head.encode() + (body or b"")

    def signed(self, path: str, body: bytes | None = None, content_type: str = JSON_TYPE) -> bytes:
        """As `request`, signed now. The body of a file is not covered.

        See docs/reference/protocol.md#push-a-file.
        """
        signature = signing.sign_request(
            self._keys,
            "GET" if body is None else "POST",
            path,
            body if body and content_type == JSON_TYPE else b"",
            self._signed_host,
            int(time.time() * 1000),
            os.urandom(16),
        )
        lines = "".join(f"{name}: {value}\r\n" for name, value in signature.items())
        return self.request(path, body, self._lines + lines, content_type)

    def proof(self, key: str, data: bytes) -> dict[str, str]:
        """The members of an append to the log at `key` that prove who wrote `data`."""
        return signing.sign_author(self._keys, signing.APPEND_AUTHOR, key, data)


def padded_object(head: str, size: int) -> bytes:
    """An object whose last member, a text that `head` opens, makes it `size` bytes long."""
    room = size - len(head) - len('"}')
    return (head + (_WORDS * (room // len(_WORDS) + 1))[:room] + '"}').encode()


@dataclass(frozen=True, slots=True)
class Measurement:
    """One run. `answers` had the expected status and length, `errors` counts the others by what they had
    instead, and connections that broke. `generator_busy` is the share of time that it had answers to read:
    near 1, it was the one measured. `server_cpu_us` is the server's CPU time per answer over the run, all
    threads, None where its process is not known."""

    workload: str
    answers: int
    errors: dict[str, int]
    seconds: float
    per_second: float
    mb_per_second: float
    p50_ms: float
    p99_ms: float
    generator_busy: float
    server_cpu_us: float | None


class Run:
    """Requests of a run, dealt out to connections, and their results."""

    def __init__(self, requests: Iterable[bytes], expect: int, at_least: int, seconds: float) -> None:
        self.requests = iter(requests)
        self.expect = expect
        self.at_least = at_least
        self.ends = time.perf_counter() + seconds
        self.latencies = array("d")
        self.errors: Counter[str] = Counter()
        self.rejected = 0
        """The status of the first answer that rejects the credentials."""
        self.sent_bytes = 0
        self.polling = True
        self.idle_s = 0.0
        self._loop = asyncio.get_running_loop()
        self._polled_at = time.perf_counter()
        self._polled_count = 0

    def poll(self) -> None:
        """Keep the loop turning instead of sleeping: a server would pay for waking this process, and the more
        the slower it is. A turn that brought no answer was idle."""
        now = time.perf_counter()
        answers = len(self.latencies)
        if answers == self._polled_count:
            self.idle_s += now - self._polled_at
        self._polled_at, self._polled_count = now, answers
        if self.polling:
            self._loop.call_soon(self.poll)


class LoadConnection(asyncio.Protocol):
    """One keep-alive connection that works off its run. `closed` is done when it has nothing left to do."""

    def __init__(self) -> None:
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self.transport = cast(asyncio.Transport, transport)

    def start(self, run: Run) -> None:
        """Send the first request of `run`."""
        self.run = run
        self.head = b""
        self.missing = 0
        self.done = False
        self.sent_at = time.perf_counter()
        self._send_next(self.sent_at)

    def data_received(self, data: bytes) -> None:
        """Count a response, and send the next request."""
        if self.missing == 0:
            data = self.head + data
            end = data.find(b"\r\n\r\n")
            if end < 0:
                self.head = data
                return
            self.head = b""
            self.status, self.length = read_head(data[: end + 2])
            self.missing = end + 4 + self.length
        self.missing -= len(data)
        if self.missing == 0:
            self._finish_response()

    def connection_lost(self, error: Exception | None) -> None:
        """End the run of this connection."""
        if not self.done:
            self.run.errors["connection lost"] += 1
        self.closed.set_result(None)

    def _finish_response(self) -> None:
        now = time.perf_counter()
        run = self.run
        if self.status != run.expect:
            run.errors[str(self.status)] += 1
            if self.status in (401, 403):  # as it would be for all others
                run.rejected = run.rejected or self.status
                run.requests = iter(())
        elif self.length < run.at_least:
            run.errors["too short"] += 1
        else:
            run.latencies.append(now - self.sent_at)
        self.sent_at = now
        self._send_next(now)

    def _send_next(self, now: float) -> None:
        request = next(self.run.requests, None) if now < self.run.ends else None
        if request is None:
            self.done = True
            self.transport.close()
            return
        self.run.sent_bytes += len(request)
        self.transport.write(request)


def read_head(head: bytes) -> tuple[int, int]:
    """Status and body length of an answer to GET or POST; `head` ends with the CRLF of its last line. Raises
    ValueError where the answer does not say how long it is."""
    status = int(head[9:12])
    if status in (HTTPStatus.NO_CONTENT, HTTPStatus.NOT_MODIFIED):
        return status, 0
    length = _CONTENT_LENGTH.search(head)
    if length is None:
        raise ValueError(f"an answer without Content-Length: {head!r}")
    return status, int(length[1])


def cpu_s(pid: int) -> float:
    """CPU seconds that a process has used, all its threads. Linux names a process's CPU clock by its id; it
    counts nanoseconds, where /proc counts hundredths of a second."""
    return time.clock_gettime((~pid << 3) | 2)


async def drive(
    base_url: str,
    requests: Iterable[bytes],
    expect: int,
    *,
    connections: int,
    seconds: float,
    at_least: int = 0,
) -> tuple[Run, float]:
    """Send all requests, or as many as go into `seconds`; the run and how long it took. Raises Rejected, and
    TimeoutError 30 s after `seconds`."""
    url = urlsplit(base_url)
    loop = asyncio.get_running_loop()
    tls = ssl.create_default_context() if url.scheme == "https" else None
    port = url.port or (80 if tls is None else 443)
    opened = [
        (await loop.create_connection(LoadConnection, str(url.hostname), port, ssl=tls))[1]
        for _ in range(connections)
    ]
    run = Run(requests, expect, at_least, seconds)
    started = time.perf_counter()
    for connection in opened:
        connection.start(run)
    run.poll()
    _, unfinished = await asyncio.wait([one.closed for one in opened], timeout=seconds + 30)
    run.polling = False
    if unfinished:
        raise TimeoutError(f"{len(unfinished)} connections have no answer after {seconds + 30:g} s")
    if run.rejected:
        raise Rejected(run.rejected)
    return run, time.perf_counter() - started


async def measure(
    base_url: str,
    name: str,
    requests: Callable[[], Iterable[bytes]],
    prepare: Iterable[bytes] = (),
    *,
    seconds: float,
    expect: int = 200,
    at_least: int = 0,
    connections: int = CONNECTIONS,
    server_pid: int | None = None,
) -> Measurement:
    """Send `prepare`, which is not measured and which all is answered 200, then what `requests` makes. Raises
    RuntimeError when what it needs cannot be made, and as `drive`."""
    prepared, _ = await drive(base_url, prepare, 200, connections=connections, seconds=60)
    if prepared.errors:
        raise RuntimeError(f"{name} cannot be prepared: {dict(prepared.errors)}")
    made = requests()
    server_before = cpu_s(server_pid) if server_pid else 0.0
    run, took = await drive(
        base_url, made, expect, connections=connections, seconds=seconds, at_least=at_least
    )
    server_cpu = cpu_s(server_pid) - server_before if server_pid else None
    latencies = sorted(run.latencies) or [0.0]
    answers = len(run.latencies)
    return Measurement(
        workload=name,
        answers=answers,
        errors=dict(run.errors),
        seconds=took,
        per_second=answers / took,
        mb_per_second=run.sent_bytes / took / 1e6,
        p50_ms=latencies[len(latencies) // 2] * 1e3,
        p99_ms=latencies[len(latencies) * 99 // 100] * 1e3,
        generator_busy=1 - run.idle_s / took,
        server_cpu_us=None if server_cpu is None or not answers else server_cpu / answers * 1e6,
    )


def row(run: Measurement) -> str:
    """A line of the table under `HEADER`."""
    cpu = "" if run.server_cpu_us is None else f"{run.server_cpu_us:.1f}"
    errors = " ".join(f"{status}:{count}" for status, count in run.errors.items())
    columns = (
        f"{run.workload:16} {run.per_second:9,.0f} {run.mb_per_second:8.1f}",
        f"{run.p50_ms:8.2f} {run.p99_ms:8.2f} {cpu:>8} {run.generator_busy:6.0%}  {errors}",
    )
    return " ".join(columns).rstrip()


HEADER = (
    f"{'workload':16} {'per s':>9} {'MB/s':>8} {'p50 ms':>8} {'p99 ms':>8} {'CPU us':>8} {'busy':>6}  errors"
)

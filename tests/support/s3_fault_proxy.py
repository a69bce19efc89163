"""A proxy in front of an HTTP server, made for S3, that fails on demand."""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import aclosing
from http import HTTPStatus
from random import Random
from typing import Self
from urllib.parse import urlsplit

from multidict import CIMultiDict

from support.http_relay import (
    HEAD_BYTES,
    HttpConnection,
    MessageHead,
    RequestHead,
    exhaust,
    receive,
    response_head,
    send,
)
from support.injected_faults import (
    Abort,
    CannedResponse,
    Chaos,
    Delay,
    Fault,
    LoseReply,
    ScheduledFault,
    Truncate,
    When,
    slow_down,
)

Rewrite = Callable[[CIMultiDict[str]], None]


class FaultProxy:
    """`upstream` (`http://host:port`), failing on demand, at `url` while it is open:

        async with FaultProxy(server_url) as proxy:
            proxy.lose_reply("PUT")
            ... ask proxy.url ...

    Requests and answers pass as they came, `Host` too, which signatures cover; a body is streamed, and kept
    connections stay. One client connection has one connection upstream, so nothing is sent twice.

    Faults: each is met by the next requests of one of `kinds` (the words of `calls`; none given: of any) for
    which `when` holds, after `after` of them that go well; `times` requests in all, None: until `reset`. A
    request meets one fault at most: the one asked for first.

    Counted: `calls` by kind: "GET", "PUT", "HEAD", "DELETE", "LIST", "POST uploads", "PUT partNumber", ...
    (`Sent.kind`); `statuses` of what was answered; `met`, the faults by their names; `max_concurrent`, how
    many requests were under way together. `reset_counts()` lets them begin anew.
    """

    def __init__(self, upstream: str) -> None:
        parts = urlsplit(upstream)
        if parts.scheme != "http" or parts.hostname is None:
            raise ValueError(f"not the URL of a server: {upstream!r}")
        self._upstream = (parts.hostname, parts.port or 80)
        self._server: asyncio.Server | None = None
        self._serving: set[asyncio.Task[None]] = set()
        self._scheduled: list[ScheduledFault] = []
        self._chaos: Chaos | None = None
        self._request_rewrites: list[Rewrite] = []
        self._response_rewrites: list[Rewrite] = []
        self._in_flight = 0
        self.url = ""
        self.reset_counts()

    def reset_counts(self) -> None:
        """Count from nothing again."""
        self.calls: Counter[str] = Counter()
        self.statuses: Counter[int] = Counter()
        self.met: Counter[str] = Counter()
        self.max_concurrent = self._in_flight

    async def __aenter__(self) -> Self:
        def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.ensure_future(self._serve(HttpConnection(reader, writer)))
            self._serving.add(task)
            task.add_done_callback(self._serving.discard)

        self._server = await asyncio.start_server(connected, "127.0.0.1", 0, limit=HEAD_BYTES)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *exception: object) -> None:
        """Ends every connection, those that are delayed too."""
        assert self._server is not None
        self._server.close()
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)
        await self._server.wait_closed()

    def delay(
        self,
        *kinds: str,
        until: asyncio.Event | float,
        when: When | None = None,
        times: int | None = 1,
        after: int = 0,
    ) -> asyncio.Event:
        """Forward the request only when `until` is set, or so many seconds later, also where the client has
        left by then. The returned event is set once it has come whole."""
        fault = Delay(until)
        self._scheduled.append(ScheduledFault(fault, kinds, when, times, after))
        return fault.arrived

    def throttle(self, *kinds: str, when: When | None = None, times: int | None = 1, after: int = 0) -> None:
        """Answer 503 SlowDown as S3 does; nothing is forwarded."""
        self._scheduled.append(ScheduledFault(slow_down(), kinds, when, times, after))

    def abort(self, *kinds: str, when: When | None = None, times: int | None = 1, after: int = 0) -> None:
        """Break the connection; nothing is forwarded."""
        self._scheduled.append(ScheduledFault(Abort(), kinds, when, times, after))

    def lose_reply(
        self, *kinds: str, when: When | None = None, times: int | None = 1, after: int = 0
    ) -> None:
        """Forward the request, and break the connection when it has been answered."""
        self._scheduled.append(ScheduledFault(LoseReply(), kinds, when, times, after))

    def respond(
        self,
        *kinds: str,
        status: int,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
        forwarded: bool = False,
        instead_of: int | None = None,
        when: When | None = None,
        times: int | None = 1,
        after: int = 0,
    ) -> None:
        """Answer this; the request is `forwarded` all the same, or not. `instead_of`: forward it, and answer
        this only where the real answer has that status; any other passes, and is not one of `times`."""
        fault = CannedResponse(status, body, headers or {}, forwarded or instead_of is not None, instead_of)
        self._scheduled.append(ScheduledFault(fault, kinds, when, times, after))

    def truncate(
        self, *kinds: str, to_bytes: int, when: When | None = None, times: int | None = 1, after: int = 0
    ) -> None:
        """Break the connection after `to_bytes` of the answer's body, whose head promises all of it."""
        self._scheduled.append(ScheduledFault(Truncate(to_bytes), kinds, when, times, after))

    def drop_header(self, name: str) -> None:
        """Forward every request without this header, as if the server did not know it. A server that checks
        signatures refuses what lacks a signed header."""

        def drop(headers: CIMultiDict[str]) -> None:
            headers.popall(name, None)

        self.rewrite(sent=drop)

    def rewrite(self, sent: Rewrite | None = None, answered: Rewrite | None = None) -> None:
        """Change the headers of every request before it is forwarded, of every answer of upstream's before it
        is given back. Each changes the headers that it is called with, in place."""
        if sent is not None:
            self._request_rewrites.append(sent)
        if answered is not None:
            self._response_rewrites.append(answered)

    def chaos(
        self,
        random: Random,
        *,
        abort: float = 0.0,
        lose_reply: float = 0.0,
        throttle: float = 0.0,
        delay: float = 0.0,
        delay_s: float = 0.1,
    ) -> None:
        """From now on have such shares of all requests, those apart that meet a fault asked for, fail so; a
        delay lasts up to `delay_s`. `random` decides, request by request in the order of arrival."""
        self._chaos = Chaos(random, (abort, lose_reply, throttle, delay), delay_s)

    def reset(self) -> None:
        """Forget all faults, rewrites and chaos. What is delayed now stays so."""
        self._scheduled.clear()
        self._request_rewrites.clear()
        self._response_rewrites.clear()
        self._chaos = None

    async def _serve(self, client: HttpConnection) -> None:
        """Exchange after exchange of one client connection, until either side ends it."""
        upstream: HttpConnection | None = None
        try:
            while (head := await client.head()) is not None:
                if upstream is not None and upstream.is_closed:
                    upstream.abort()
                    upstream = None
                if upstream is None:
                    upstream = await HttpConnection.connect(*self._upstream)
                if not await self._exchange(head, client, upstream):
                    break
            await client.close()
        except (OSError, asyncio.IncompleteReadError):
            pass  # either has left, or upstream is not there: the other is told by the end of its connection
        finally:
            client.abort()
            if upstream is not None:
                upstream.abort()

    async def _exchange(self, head: MessageHead, client: HttpConnection, upstream: HttpConnection) -> bool:
        """One request and its answer. Whether the connections go on."""
        sent = RequestHead.of(head)
        self.calls[sent.kind] += 1
        self._in_flight += 1
        self.max_concurrent = max(self.max_concurrent, self._in_flight)
        try:
            return (
                await self._apply(self._find_fault(sent), sent, head, client, upstream) and not head.closes()
            )
        finally:
            self._in_flight -= 1

    async def _apply(
        self,
        planned: ScheduledFault | None,
        sent: RequestHead,
        head: MessageHead,
        client: HttpConnection,
        upstream: HttpConnection,
    ) -> bool:
        """Answer one request with what is planned for it. Whether the connections go on."""
        waits_for_answer = planned is not None and planned.waits_for_response
        fault = None if planned is None or waits_for_answer else self._use(planned)
        if isinstance(fault, Abort):
            return False
        body = await receive(head, client)
        if isinstance(fault, Delay):
            await fault.wait()
        if isinstance(fault, CannedResponse) and not fault.forwarded:
            await exhaust(body)
            return await self._send_response(fault, sent, client)
        for rewrite in self._request_rewrites:
            rewrite(head.headers)
        sending = asyncio.ensure_future(send(head, body, upstream))
        try:
            answer = await response_head(upstream)
            if planned is not None and planned.waits_for(answer.status):
                fault = self._use(planned)
            goes_on = await self._forward_response(answer, fault, sent, client, upstream)
            return goes_on and sending.done()
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)

    async def _forward_response(
        self,
        answer: MessageHead,
        fault: Fault | None,
        sent: RequestHead,
        client: HttpConnection,
        upstream: HttpConnection,
    ) -> bool:
        """Give upstream's answer to the client, as far as `fault` lets it. Whether the connections go on."""
        framing = answer.response_framing(sent.method)
        async with aclosing(upstream.body(framing)) as body:
            if isinstance(fault, LoseReply):
                await exhaust(body)
                return False
            if isinstance(fault, CannedResponse):
                await exhaust(body)
                return await self._send_response(fault, sent, client)
            for rewrite in self._response_rewrites:
                rewrite(answer.headers)
            self.statuses[answer.status] += 1
            await client.send(bytes(answer))
            left = fault.to_bytes if isinstance(fault, Truncate) else None
            async for chunk in body:
                if not await client.send(chunk[:left]):
                    return False
                if left is not None:
                    left -= len(chunk)
                    if left <= 0:
                        return False
        return left is None and framing != "to_the_end" and not answer.closes()

    async def _send_response(self, answer: CannedResponse, sent: RequestHead, client: HttpConnection) -> bool:
        """An answer of ours. Whether the client took it."""
        headers = CIMultiDict(answer.headers)
        headers["Content-Length"] = str(len(answer.body))
        head = MessageHead(f"HTTP/1.1 {answer.status} {HTTPStatus(answer.status).phrase}", headers)
        self.statuses[answer.status] += 1
        return await client.send(bytes(head) + (b"" if sent.method == "HEAD" else answer.body))

    def _find_fault(self, sent: RequestHead) -> ScheduledFault | None:
        for planned in self._scheduled:
            if planned.is_for(sent):
                return planned
        drawn = self._chaos.draw() if self._chaos else None
        return ScheduledFault(drawn) if drawn else None

    def _use(self, planned: ScheduledFault) -> Fault | None:
        """What the request meets that `planned` is for."""
        if planned.after:
            planned.after -= 1
            return None
        if planned.times is not None:
            planned.times -= 1
            if planned.times <= 0 and planned in self._scheduled:
                self._scheduled.remove(planned)
        self.met[planned.fault.name] += 1
        return planned.fault

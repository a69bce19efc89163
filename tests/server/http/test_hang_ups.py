"""Clients that close or reset a connection, at every point of a request, cause no error."""

import itertools
import json
import signal
import socket
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import pytest
from support.clients import Browser
from support.server_process import Process, serving

GET = b"GET /pull/notes/large HTTP/1.1\r\nHost: h\r\n\r\n"
BODY = json.dumps({"data": {"text": "x" * 20_000}, "baseHash": None}).encode()
PUSH = (
    b"POST /push/notes/a HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n" % len(BODY)
)
SENT = {
    "nothing": b"",
    "half a head": GET[:20],
    "a head": PUSH,
    "half a body": PUSH + BODY[:10_000],
    "a push": PUSH + BODY,
    "a pull": GET,
    "3 pulls": GET * 3,
    "30 pulls": GET * 30,
    "a push, 3 pulls and half a push": PUSH + BODY + GET * 3 + PUSH,
}
"""What clients send before they hang up."""
CLIENTS, ROUNDS = 50, 4
RESET_ON_CLOSE = struct.pack("ii", 1, 0)


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Process]:
    async with serving(tmp_path) as service:
        yield service


@pytest.mark.process
@pytest.mark.parametrize("reset", [False, True], ids=["close", "reset"])
@pytest.mark.parametrize("sent", SENT.values(), ids=SENT)
async def test_clients_that_hang_up_leave_the_error_log_empty(
    service: Process, sent: bytes, reset: bool
) -> None:
    async with aiohttp.ClientSession() as session:
        browser = Browser(service.base, session)
        assert (await browser.push("notes/large", {"text": "x" * 100_000})).status == 200
        url = urlsplit(service.base)
        for _, read_bytes in itertools.product(range(ROUNDS), (0, 1_000) if GET in sent else (0,)):
            clients = [socket.create_connection((url.hostname, url.port)) for _ in range(CLIENTS)]
            for client in clients:
                client.sendall(sent)
            for client in clients:
                if read_bytes:
                    client.recv(read_bytes)
                if reset:
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
                client.close()
        assert (await browser.pull("notes/large")).status == 200
    service.signal(signal.SIGTERM)
    assert await service.ended() == 0
    lines = [json.loads(line) for line in service.log.read_text().splitlines()]
    assert [line for line in lines if line["level"] in ("warning", "error")] == []

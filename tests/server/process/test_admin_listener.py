"""The operators' listener (`server.admin`) responds whatever the event loop does."""

import asyncio
import base64
import hashlib
import json
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar, NamedTuple, cast

import aiohttp
import pytest
import pytest_asyncio
from components import free_port
from support.cli_runner import running
from support.cli_service import ADMIN_TOKEN
from support.clients import Browser
from support.collections import NOTES
from support.loop_time import loop_time
from support.worker_processes import workers

from pysync import config
from pysync.errors import StoreUnavailable
from pysync.model import unobserved
from pysync.server.app import create_app
from pysync.server.http.responses import Response
from pysync.server.process import admin, readiness
from pysync.server.process.admin import AdminListener
from pysync.server.process.admin_pages import AdminPages
from pysync.server.process.metrics import Counters
from pysync.server.process.operator_action import AdminRequest
from pysync.server.process.readiness import Readiness
from pysync.server.process.serve import serve_on
from pysync.server.process.watchdog import TURN_EVERY_S, LoopMonitor
from pysync.server.process.worker import STALL_S
from pysync.store.memory import MemoryStore

PAGES = ("/health", "/health/ready", "/metrics", "/openapi.json", "/version", "/admin")


class Reply(NamedTuple):
    status: int
    headers: Any
    body: bytes


def request(port: int, path: str, method: str = "GET", headers: dict[str, str] | None = None) -> Reply:
    """Send a request and wait for the response, without an event loop."""
    connection = HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request(method, path, headers=headers or {})
        response = connection.getresponse()
        return Reply(response.status, response.headers, response.read())
    finally:
        connection.close()


class Service(NamedTuple):
    """A service with an operators' listener on a port of its own."""

    app: Any
    base: str
    port: int

    async def request(self, path: str, method: str = "GET", headers: dict[str, str] | None = None) -> Reply:
        return await asyncio.to_thread(request, self.port, path, method, headers)

    def request_while_blocked(self, *paths: str) -> list[Reply]:
        """Send requests from a thread, and block the event loop until all are answered."""
        answers: list[Reply] = []
        thread = Thread(target=lambda: answers.extend(request(self.port, path) for path in paths))
        thread.start()
        thread.join()
        return answers


StartAdmin = Callable[..., Awaitable[Service]]


@pytest_asyncio.fixture
async def start_admin() -> AsyncIterator[StartAdmin]:
    async with AsyncExitStack() as stack:

        async def start(store: MemoryStore | None = None, hosts: Sequence[str] = (), **more: Any) -> Service:
            server = {"admin": {"port": 0, "hosts": list(hosts)} if hosts else {"port": 0}}
            members = {"server": server, "store": "memory:", "collections": [NOTES], **more}
            app = await stack.enter_async_context(await create_app(config.parse(members), store))
            listener = AdminListener(app.admin_pages, "127.0.0.1", 0)
            stack.push_async_callback(listener.close)
            port = await stack.enter_async_context(serve_on(app))
            return Service(app, f"http://127.0.0.1:{port}", listener.port)

        yield start


async def test_operators_are_answered_while_the_event_loop_is_blocked(start_admin: StartAdmin) -> None:
    service = await start_admin()
    assert (await service.request("/health/ready")).status == 200
    pages = [page for page in PAGES if page != "/health/ready"]
    answers = dict(zip(pages, service.request_while_blocked(*pages), strict=True))
    assert {answer.status for answer in answers.values()} == {200}
    assert json.loads(answers["/health"].body)["ok"] is True
    assert b"pysync_build_info" in answers["/metrics"].body
    assert "/pull/notes/{id}" in json.loads(answers["/openapi.json"].body)["paths"]
    assert json.loads(answers["/admin"].body)["ready"] is True


async def test_only_health_remains_at_the_public_address(
    start_admin: StartAdmin, session: aiohttp.ClientSession
) -> None:
    service = await start_admin()
    browser = Browser(service.base, session)
    statuses = {page: (await browser.request("GET", page)).status for page in PAGES}
    assert statuses == dict.fromkeys(PAGES, 404) | {"/health": 200}
    assert {page: (await service.request(page)).status for page in PAGES} == dict.fromkeys(PAGES, 200)


async def test_operators_get_the_requests_that_the_public_address_served(
    start_admin: StartAdmin, session: aiohttp.ClientSession
) -> None:
    service = await start_admin()
    assert (await Browser(service.base, session).pull("notes/a")).status == 200
    line = b'pysync_requests_total{action="pull",collection="notes",status="200"} 1.0'
    assert line in (await service.request("/metrics")).body
    assert json.loads((await service.request("/admin")).body)["requests"] == 1


async def test_health_fails_once_the_event_loop_is_blocked_for_long() -> None:
    now = 100.0
    monitor = LoopMonitor(unobserved, lambda: now)
    pages = AdminPages(Readiness([]), bytes, Counters, bytes, lambda: 0, monitor, None, dict, {}, ())
    for blocked_s, status in ((0.0, 200), (STALL_S, 200), (STALL_S + 1, 503)):
        now = 100.0 + TURN_EVERY_S + blocked_s
        response = pages.respond(AdminRequest("GET", "/health"))
        assert response.status == status
    assert b"blocked for 11 s" in response.content


async def test_time_of_a_blocked_event_loop_is_known_to_other_threads() -> None:
    now, measured = 100.0, list[float]()
    monitor = LoopMonitor(unobserved, lambda: now)
    now += TURN_EVERY_S + 7.0
    thread = Thread(target=lambda: measured.append(monitor.blocked_s))
    thread.start()
    thread.join()  # the loop cannot turn meanwhile
    assert measured == [7.0]
    turning = asyncio.create_task(monitor.run())
    while monitor.blocked_s:
        await asyncio.sleep(0)
    turning.cancel()


async def test_an_event_loop_that_is_blocked_for_long_is_not_ready(
    start_admin: StartAdmin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readiness, "READY_S", 0.05)
    service = await start_admin()
    while (await service.request("/health/ready")).status != 200:
        pass
    *_, rejected = service.request_while_blocked("/health/ready", "/health/ready")
    assert rejected.status == 503
    assert b"event loop" in rejected.body
    while (await service.request("/health/ready")).status != 200:
        pass


async def test_a_service_that_is_about_to_stop_is_healthy_and_not_ready(start_admin: StartAdmin) -> None:
    service = await start_admin()
    service.app.drain()
    rejected = await service.request("/health/ready")
    assert (rejected.status, json.loads(rejected.body)["code"]) == (503, "unavailable")
    assert (await service.request("/health")).status == 200


async def test_requests_that_are_no_reads_of_a_page_are_rejected(start_admin: StartAdmin) -> None:
    service = await start_admin()
    unknown, posted = await service.request("/pull/notes/a"), await service.request("/metrics", "POST")
    assert (unknown.status, json.loads(unknown.body)["error"]) == (404, "Not found")
    assert (posted.status, posted.headers["Allow"]) == (405, "GET, HEAD")
    head, whole = await service.request("/version?x=1", "HEAD"), await service.request("/version")
    assert (head.status, head.body) == (200, b"")
    assert head.headers["Content-Length"] == str(len(whole.body))
    assert head.headers["X-Request-Id"] != whole.headers["X-Request-Id"]


@pytest.mark.parametrize(
    ("host", "is_served"),
    [
        ("127.0.0.1", True),
        ("10.1.2.3:8081", True),
        ("[::1]:8081", True),
        ("localhost:8081", True),
        ("LOCALHOST", True),
        ("ops.internal:8081", True),
        ("Ops.Internal", True),
        ("rebound.example", False),
        ("rebound.example:8081", False),
        ("127.0.0.1.rebound.example", False),
        ("127.0.0.1@rebound.example", False),
        ("[::1].rebound.example", False),
        ("", False),
    ],
)
async def test_pages_below_admin_are_served_only_under_hosts_of_operators(
    start_admin: StartAdmin, host: str, is_served: bool
) -> None:
    token = {"Authorization": f"Bearer {ADMIN_TOKEN}"}
    auth = {"adminToken": ADMIN_TOKEN}
    service = await start_admin(hosts=["ops.internal"], auth=auth, quotas={})
    for page in ("/admin", "/admin/usage", "/admin/unknown"):
        answer = await service.request(page, headers={"Host": host} | token)
        served = 404 if page == "/admin/unknown" else 200
        assert answer.status == (served if is_served else 421)
        assert is_served or json.loads(answer.body)["code"] == "misdirected_request"
    for page in ("/metrics", "/health", "/health/ready"):
        assert (await service.request(page, headers={"Host": host})).status == 200


async def test_browsers_get_a_page_that_runs_nothing_but_its_own_script(start_admin: StartAdmin) -> None:
    service = await start_admin()
    browsers = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"
    page = await service.request("/admin", headers={"Accept": browsers})
    assert (page.status, page.headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert (page.headers["Vary"], page.headers["Cache-Control"]) == ("Accept", "no-store")
    text = page.body.decode()
    policy = dict(part.split(" ", 1) for part in page.headers["Content-Security-Policy"].split("; "))
    for tag in ("script", "style"):
        (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert policy.pop(f"{tag}-src") == f"'sha256-{digest}'"
    assert policy == {
        "default-src": "'none'",
        "connect-src": "'self'",
        "img-src": "'self' data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    assert not re.search(r"""\b(?:src|href|action)=(?!"(?:#|data:))|\bon\w+=|\bstyle=|@import|url\(""", text)
    assert text.count("\n") <= 700
    for accepted in ({}, {"Accept": "*/*"}, {"Accept": "application/json"}):
        answer = await service.request("/admin", headers=accepted)
        assert json.loads(answer.body)["workers"][0]["alive"] is True
        assert answer.headers["Vary"] == "Accept"
    assert (await service.request("/admin", "HEAD", {"Accept": browsers})).body == b""


@pytest.mark.parametrize("page", ["/admin/usage", "/admin/erase"])
async def test_pages_that_name_or_erase_something_need_the_admin_token(
    start_admin: StartAdmin, page: str
) -> None:
    service = await start_admin(auth={"adminToken": ADMIN_TOKEN}, quotas={})
    method = "POST" if page == "/admin/erase" else "GET"
    for authorization in ("", "Bearer wrong", ADMIN_TOKEN):
        answer = await service.request(page, method, {"Authorization": authorization})
        assert (answer.status, answer.headers["WWW-Authenticate"]) == (401, "Bearer")
    answer = await service.request(page, method, {"Authorization": f"Bearer {ADMIN_TOKEN}"})
    assert answer.status == (200 if method == "GET" else 415)
    assert (await service.request("/admin")).status == 200


async def test_each_of_several_admin_tokens_opens_the_pages(start_admin: StartAdmin) -> None:
    service = await start_admin(auth={"adminToken": [ADMIN_TOKEN, ADMIN_TOKEN[::-1]]}, quotas={})
    for token, status in ((ADMIN_TOKEN, 200), (ADMIN_TOKEN[::-1], 200), (ADMIN_TOKEN * 2, 401)):
        answer = await service.request("/admin/usage", headers={"Authorization": f"Bearer {token}"})
        assert answer.status == status


@pytest.mark.parametrize("page", ["/admin/usage", "/admin/erase"])
async def test_pages_that_need_the_admin_token_say_so_if_none_is_configured(
    start_admin: StartAdmin, page: str
) -> None:
    service = await start_admin(quotas={})
    for headers in ({}, {"Authorization": "Bearer "}, {"Authorization": f"Bearer {ADMIN_TOKEN}"}):
        answer = await service.request(page, "POST" if page == "/admin/erase" else "GET", headers)
        assert (answer.status, json.loads(answer.body)["code"]) == (403, "forbidden")
        assert b"set auth.adminToken" in answer.body


async def test_readiness_is_unknown_before_the_first_probe(start_admin: StartAdmin) -> None:
    service = await start_admin()
    assert json.loads((await service.request("/admin")).body)["ready"] is None
    assert (await service.request("/health/ready")).status == 200
    assert json.loads((await service.request("/admin")).body)["ready"] is True


@pytest.mark.parametrize("sent", [b"", b"GET /hea", b"\r\n\r\n", b"\xff\xfe\r\n\r\n", b"A" * 20_000])
async def test_clients_that_send_no_request_keep_nobody_out(
    start_admin: StartAdmin, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(admin, "TIMEOUT_S", 0.1)
    service = await start_admin()
    connections = [
        socket.create_connection(("127.0.0.1", service.port)) for _ in range(2 * admin.MAX_CONNECTIONS)
    ]
    for connection in connections:
        connection.sendall(sent)
    assert (await service.request("/health")).status == 200
    for connection in connections:
        connection.close()


async def test_half_heads_do_not_delay_health(
    start_admin: StartAdmin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin, "TIMEOUT_S", 600.0)
    service = await start_admin()
    connections = []
    for _ in range(40):
        connections.append(socket.create_connection(("127.0.0.1", service.port), timeout=30))
        connections[-1].sendall(b"GET /health HTTP/1.1\r\nHost:")
    assert (await service.request("/health")).status == 200
    for connection in connections:
        connection.sendall(b" localhost\r\n\r\n")
        with connection, connection.makefile("rb") as answer:
            assert (await asyncio.to_thread(answer.readline)).startswith(b"HTTP/1.1 200 ")


async def test_oldest_half_head_gives_way_to_a_new_connection(
    start_admin: StartAdmin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin, "TIMEOUT_S", 600.0)
    service = await start_admin()
    connections = []
    for _ in range(admin.MAX_CONNECTIONS + 1):
        connections.append(socket.create_connection(("127.0.0.1", service.port), timeout=30))
        connections[-1].sendall(b"GET /health HTTP/1.1\r\nHost:")
    assert await asyncio.to_thread(connections[0].recv, 1) == b""
    assert (await service.request("/health")).status == 200
    connections[-1].sendall(b" localhost\r\n\r\n")
    assert (await asyncio.to_thread(connections[-1].recv, 13)) == b"HTTP/1.1 200 "
    for connection in connections:
        connection.close()


class ExhaustedPages:
    """Pages for which there is no memory."""

    actions: ClassVar[dict[str, object]] = {}
    is_exhausted = True

    def respond(self, request: AdminRequest) -> Response:
        if self.is_exhausted:
            raise MemoryError
        return Response(200, b"{}")


async def test_requests_that_find_no_memory_keep_nobody_out() -> None:
    pages = ExhaustedPages()
    listener = AdminListener(cast("AdminPages", pages), "127.0.0.1", 0)
    for _ in range(2 * admin.MAX_CONNECTIONS):
        with pytest.raises((HTTPException, ConnectionError)):
            await asyncio.to_thread(request, listener.port, "/health")
    pages.is_exhausted = False
    assert (await asyncio.to_thread(request, listener.port, "/health")).status == 200
    await listener.close()


@pytest.mark.process
async def test_an_address_that_is_in_use_is_named(start_admin: StartAdmin, tmp_path: Path) -> None:
    service = await start_admin()
    members = {"server": {"port": 0, "admin": {"port": service.port}}, "store": "memory:"}
    (tmp_path / "pysync.json").write_text(json.dumps({"version": 1, **members}))
    async with running("serve", "--config", str(tmp_path / "pysync.json")) as process:
        _, errors = await process.communicate()
    assert process.returncode != 0
    assert f"server.admin: cannot listen on 127.0.0.1 port {service.port}" in errors.decode()


class Wavering(MemoryStore):
    """A store whose next probes end as a test says."""

    def __init__(self, *outcomes: bool) -> None:
        super().__init__()
        self.outcomes = list(outcomes)

    async def probe(self) -> None:
        if not self.outcomes.pop(0):
            raise StoreUnavailable("no route to host")


async def probed(store: Wavering) -> list[bool]:
    """Whether the service is ready after each probe, until the store knows no more outcomes."""
    checked = readiness.Readiness([store.probe])
    found = []
    with loop_time() as time:
        while store.outcomes:
            checking = asyncio.ensure_future(checked.check())
            found.append(await time.pass_until(checking, readiness.RETRY_S / 10) is None)
            time.now_s += readiness.PROBE_EVERY_S
    return found


async def test_one_failed_probe_does_not_turn_readiness() -> None:
    store = Wavering(True, False, True, False, True, False, False, True)
    assert await probed(store) == [True, True, True, False, True]


async def test_a_service_is_not_ready_before_its_first_successful_probe() -> None:
    assert await probed(Wavering(False, True, True)) == [True, True]
    assert readiness.Readiness([]).error is not None


async def test_changes_of_readiness_are_logged_once_each(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "pysync.server")
    await probed(Wavering(True, True, *[False] * 6, True, True, False, True))
    assert [record.getMessage() for record in caplog.records] == [
        "not ready: no route to host",
        "ready again",
    ]


async def test_concurrent_probes_query_the_store_once() -> None:
    store = Wavering(True)
    checked = readiness.Readiness([store.probe])
    assert await asyncio.gather(*(checked.check() for _ in range(100))) == [None] * 100
    assert await checked.check() is None


@pytest.mark.process
async def test_each_worker_answers_operators_for_all(tmp_path: Path) -> None:
    port = free_port()
    server = {"workers": 2, "admin": {"port": port}}

    async def page(path: str) -> bytes:
        return (await asyncio.to_thread(request, port, path)).body

    async with workers(tmp_path, server=server) as service, aiohttp.ClientSession() as session:
        found: set[int] = set()
        while found != {1, 2}:
            found.add(json.loads(await page("/admin"))["worker"])
        for n in range(3):
            assert (await Browser(service.base, session).push(f"notes/{n}", {"n": n})).status == 200
        line = b'pysync_requests_total{action="push",collection="notes",status="200"} 3.0'
        for _ in range(8):
            while line not in await page("/metrics"):
                pass
        pids = service.pids()
        await service.kill(1)
        found.clear()
        while found != set(service.pids().values()):
            found.add(json.loads(await page("/admin"))["pid"])
            found.discard(pids[1])


async def test_usage_is_shown_by_collection_if_there_are_quotas(
    session: aiohttp.ClientSession, folder: Path
) -> None:
    members = {
        "server": {"admin": {"port": 0}}, "store": f"file:{folder}", "collections": [NOTES],
        "auth": {"adminToken": ADMIN_TOKEN},
    }  # fmt: skip
    choices: list[dict[str, Any]] = [{"quotas": {}}, {}]
    for quotas in choices:
        async with await create_app(config.parse({**members, **quotas})) as app, serve_on(app) as port:
            listener = AdminListener(app.admin_pages, "127.0.0.1", 0)
            key = "n2" if quotas else "n3"
            await Browser(f"http://127.0.0.1:{port}", session).push(f"notes/{key}", {})
            token = {"Authorization": f"Bearer {ADMIN_TOKEN}"}
            answer = await asyncio.to_thread(request, listener.port, "/admin/usage", "GET", token)
            await listener.close()
        assert answer.status == (200 if quotas else 404)
        if quotas:
            page = json.loads(answer.body)
            (notes,) = page["collections"]
            assert notes == {**page["namespaces"][0], "name": "notes"}
            assert notes["documents"] == 1
            assert page["identities"] == page["spaces"] == page["issuers"] == []

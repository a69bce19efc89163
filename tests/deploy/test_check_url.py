"""`pysync check --probe --url`: what a proxy does wrong is found from outside, one fault at a time."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import RawTestServer
from components import free_port
from components.fixtures import StartNginx
from support.cli_runner import Shell
from support.clients import Start
from support.collections import OWN, collection
from support.nginx_fixture import front

from pysync.config import Problem, parse
from pysync.diagnose import ProxyProbe, Report

TOKEN = "a-token-of-the-operator"
SERVICE: dict[str, Any] = {
    "server": {"trustedProxyHops": 1},
    "auth": {"adminToken": TOKEN},
    "collections": [collection("mine", "u/{identity}/{id}", **OWN)],
}
KEPT = [
    "proxy_http_version 1.1;",
    'proxy_set_header Connection "";',
    "proxy_set_header Host $http_host;",
    "proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for;",
]
COMPRESSING = "gzip on; gzip_proxied any; gzip_types text/event-stream; gzip_min_length 0;"


def behind(
    start_nginx: StartNginx, node: str, port: int, *, without: str = "", more: str = "", path: str = ""
) -> str:
    """The URL of an nginx on `port` that passes requests on to `node`, with a fault."""
    lines = [line for line in KEPT if not without or without not in line]
    location = " ".join([f"proxy_pass {node}{path};", *lines, more])
    return start_nginx(f"server {{ listen 127.0.0.1:{port}; location / {{ {location} }} }}", port).url


async def probed(url: str, settings: dict[str, Any] = SERVICE, watch_s: float = 10.0) -> Report:
    report = Report()
    await ProxyProbe(parse({"version": 1, "store": "memory:", **settings}), url, report, watch_s).run()
    return report


@asynccontextmanager
async def answering(answer: web.StreamResponse) -> AsyncIterator[str]:
    """The URL of a server that gives the first request this answer."""
    answers = iter([answer])

    async def respond(request: web.BaseRequest) -> web.StreamResponse:
        return next(answers, web.Response(status=404))

    async with RawTestServer(respond) as server:
        yield str(server.make_url("/"))


def with_server(**members: Any) -> dict[str, Any]:
    return {**SERVICE, "server": {**SERVICE["server"], **members}}


@pytest.mark.slow
async def test_deployed_site_passes_everything_on(
    start: Start, start_nginx: StartNginx, shell: Shell, tmp_path: Path
) -> None:
    url = front(start_nginx, await start(SERVICE))
    (tmp_path / "pysync.json").write_text(json.dumps({"version": 1, "store": "memory:", **SERVICE}))
    status, output, errors = await shell.run_async("check", "--probe", "--url", url)
    assert (status, errors) == (0, "")
    found = dict(re.findall(r"^url (\w+) +(.+)$", output, re.M))
    assert found.pop("streams").startswith("as they come, for ")
    assert found == {
        "clock": "as this machine's",
        "addresses": "forwarded: yours is 127.0.0.1",
        "host": "unchanged",
        "path": "unchanged",
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "what", "said"),
    [
        ({"without": "Host"}, "host", "the proxy changes the Host header"),
        ({"path": "/"}, "path", "the proxy rewrites paths"),
        ({"without": "X-Forwarded-For"}, "addresses", "nothing adds one to X-Forwarded-For"),
        ({"more": COMPRESSING}, "streams", "the proxy compresses change streams (gzip)"),
        ({"more": "proxy_read_timeout 1s;"}, "streams", "the proxy cuts change streams"),
    ],
)
async def test_fault_of_a_proxy_is_named(
    start: Start, start_nginx: StartNginx, fault: dict[str, str], what: str, said: str
) -> None:
    report = await probed(behind(start_nginx, await start(SERVICE), free_port(), **fault))
    faults = {problem.path: problem.message for problem in report.problems}
    if what == "host":  # the signature of the stream's request covers it
        assert dict(report.rows)["url streams"].startswith("not checked: ")
    assert faults.keys() == {f"url {what}"}
    assert faults[f"url {what}"].startswith(said)
    assert dict(report.rows)[f"url {what}"] == "wrong"


@pytest.mark.slow
async def test_buffered_stream_is_named(start: Start, start_nginx: StartNginx) -> None:
    buffering = "proxy_buffering on; proxy_ignore_headers X-Accel-Buffering;"
    url = behind(start_nginx, await start(SERVICE), free_port(), more=buffering)
    report = await probed(url, watch_s=2)
    assert [problem.path for problem in report.problems] == ["url streams"]
    assert report.problems[0].message.startswith("the proxy buffers change streams")


@pytest.mark.slow
@pytest.mark.parametrize(("hops", "said"), [(0, "the proxy is taken for the caller"), (2, "can forge")])
async def test_wrong_number_of_trusted_proxies_is_named(
    start: Start, start_nginx: StartNginx, hops: int, said: str
) -> None:
    service = with_server(trustedProxyHops=hops)
    report = await probed(behind(start_nginx, await start(service), free_port()), service)
    (problem,) = report.problems
    assert problem.path == "url addresses"
    assert f"server.trustedProxyHops is {hops}" in problem.message
    assert said in problem.message


@pytest.mark.slow
@pytest.mark.parametrize(("without", "lacks"), [("Host", False), ("", True)])
async def test_rejected_host_is_changed_or_missing_in_the_configuration(
    start: Start, start_nginx: StartNginx, without: str, lacks: bool
) -> None:
    port = free_port()
    service = with_server(publicHosts=["sync.example" if lacks else f"127.0.0.1:{port}"])
    report = await probed(behind(start_nginx, await start(service), port, without=without), service)
    said = f"server.publicHosts lacks 127.0.0.1:{port}" if lacks else "the proxy changes the Host header"
    assert report.problems[0].path == "url host"
    assert report.problems[0].message.startswith(said)


async def test_checks_that_lack_a_member_of_the_configuration_say_so(start: Start) -> None:
    closed = [collection("pages", readRoles=["admin"], writeRoles=["admin"])]
    service = {"server": {"cors": {"origins": ["*"]}}, "collections": closed}
    report = await probed(await start(service), service)
    assert report.problems == []
    assert {what: finding for what, finding in report.rows if finding.startswith("not checked")} == {
        "url addresses": "not checked: that takes auth.adminToken",
        "url host": "not checked: that takes server.publicHosts, or other cors.origins",
        "url streams": "not checked: a new key may read no collection, or is not accepted",
    }


@pytest.mark.slow
async def test_proxy_that_answers_by_itself_is_no_proof_of_an_unchanged_host(
    start: Start, start_nginx: StartNginx
) -> None:
    denying = "if ($request_method = POST) { return 405; }"
    report = await probed(behind(start_nginx, await start(SERVICE), free_port(), more=denying))
    said = "POST /revocations answers 405, and not as pysync does"
    assert report.problems == [Problem("url host", said)]


async def test_address_without_pysync_is_a_problem(start_nginx: StartNginx) -> None:
    port = free_port()
    (problem,) = (await probed(f"http://127.0.0.1:{port}")).problems
    assert str(port) in problem.message
    other = start_nginx(f"server {{ listen 127.0.0.1:{port}; return 301 https://$host; }}", port).url
    report = await probed(other)
    assert report.problems == [Problem("url pysync", "GET /health answers 301, and not as pysync does")]


@pytest.mark.parametrize(
    ("headers", "received", "addresses"),
    [
        ({"Date": "soon"}, None, "not checked: "),
        ({"Date": f"Mon, 01 Jan {'9' * 30} 00:00:00 GMT"}, None, "not checked: "),
        ({}, [1], "not checked: "),
        ({}, {"client": 1, "forwardedFor": {}}, "not checked: "),
    ],
)
async def test_answer_of_another_program_is_no_error_of_the_probe(
    headers: dict[str, str], received: Any, addresses: str
) -> None:
    async with answering(web.json_response({"ok": True, "received": received}, headers=headers)) as url:
        report = await probed(url)
    assert dict(report.rows)["url addresses"].startswith(addresses)


async def test_long_answer_is_not_read_to_its_end() -> None:
    sent = 0

    async def pieces() -> AsyncIterator[bytes]:
        nonlocal sent
        while sent < 1_000:
            sent += 1
            yield bytes(65_536)

    async with answering(web.Response(body=pieces())) as url:
        report = await probed(url)
    assert report.problems[0].path == "url pysync"
    assert sent < 1_000


async def test_answer_that_trickles_is_not_waited_for() -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(100):
            await asyncio.sleep(0.02)
            yield b" "

    async with answering(web.Response(body=pieces())) as url:
        report = await probed(url, watch_s=0.5)
    assert [problem.path for problem in report.problems] == ["url"]


def test_url_is_for_the_probe(shell: Shell) -> None:
    status, _, errors = shell.run("check", "--url", "https://sync.example")
    assert (status, "--url is for --probe" in errors) == (2, True)


async def test_only_holder_of_the_admin_token_learns_which_address_arrives(
    start: Start, session: aiohttp.ClientSession
) -> None:
    base = await start(SERVICE)
    headers = {"X-Forwarded-For": "10.1.1.1, 10.2.2.2"}
    for token, received in (
        (TOKEN, {"client": "10.2.2.2", "forwardedFor": "10.1.1.1, 10.2.2.2"}),
        ("another-token-of-somebody", None),
    ):
        sent = {**headers, "Authorization": f"Bearer {token}"}
        async with session.get(f"{base}/health", headers=sent) as answer:
            assert answer.status == 200
            assert (await answer.json()).get("received") == received

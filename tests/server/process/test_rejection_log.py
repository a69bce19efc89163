"""Logs of refusals and requests: they name the check that failed, and clients learn no more than before."""

import asyncio
import json
import logging
import os
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import aiohttp
import orjson
import pytest
from support.clients import ISSUER, STRANGER, SUBJECT, Browser, Signed, Start, root_device
from support.collections import OWN, collection
from yarl import URL

from pysync.auth import issuing
from pysync.clock import wall_clock_ms
from pysync.server.api.events import EventStreamResponse
from pysync.server.process import logs
from pysync.testing import FakeClock

MINE = collection("mine", "u/{identity}/{id}", listable=True, **OWN)
TEAM = {"name": "team", "storagePath": "team/{id}", "readRoles": ["cap:read:team"], "pullOnly": True}
KEY = f"u/{SUBJECT.user_id}/a"
LOGGED = {"collections": [MINE, TEAM], "server": {"logRefusals": True}}
Lines = Callable[[], list[dict[str, Any]]]


@pytest.fixture
def lines(own_logging: None, capsys: pytest.CaptureFixture[str]) -> Lines:
    """Return the lines logged since the last call, without those of other tests."""

    def logged() -> list[dict[str, Any]]:
        if not any(isinstance(one.formatter, logs.JsonFormatter) for one in logging.getLogger().handlers):
            logs.configure(human=False)
        return [json.loads(line) for line in capsys.readouterr().err.splitlines()]

    return logged


def shown(line: dict[str, Any]) -> tuple[Any, ...]:
    return line["message"], line["status"], line["check"].partition(":")[0], line["requestId"]


async def test_each_rejection_says_which_check_failed(
    start: Start, session: aiohttp.ClientSession, lines: Lines
) -> None:
    clock = FakeClock(wall_clock_ms())
    base = await start(LOGGED, now_ms=clock)
    clock.now_ms = wall_clock_ms()
    own = root_device(SUBJECT)
    other_issuers = issuing.issue_audience_certificate(
        ISSUER, "team", aud=(ISSUER.ed_pub,), now_s=clock.now_ms // 1000, nonce=os.urandom(16)
    )
    narrow = root_device(SUBJECT, grant=issuing.Grant(("read",), ("other/*",)))
    past_s = clock.now_ms // 1000 - 9_000
    past = issuing.issue_device_certificate(
        SUBJECT, SUBJECT.ed_pub, SUBJECT.kem_pub, now_s=past_s, nonce=os.urandom(16), expires_at_s=past_s + 60
    )
    replayed = Signed(base, session, SUBJECT, own, nonce=b"n" * 16, ts_ms=clock.now_ms)
    assert (await replayed.pull(KEY)).status == 200
    spoilt = Signed(base, session, SUBJECT, own)
    spoilt.tamper = lambda headers: headers.update({"X-Starfish-Sig": "A" * 86 + "=="})
    forged = Signed(base, session, SUBJECT, own)
    forged.tamper = lambda headers: headers.update(Authorization="Cap e30=")
    late = Signed(base, session, SUBJECT, own, ts_ms=clock.now_ms - 412_000)
    cases: list[tuple[Browser, str, int, str]] = [
        (Browser(base, session), KEY, 401, "no credentials"),
        (late, KEY, 401, "clock"),
        (Signed(base, session, SUBJECT, past), KEY, 401, "expired"),
        (forged, KEY, 401, "certificate"),
        (spoilt, KEY, 401, "signature"),
        (replayed, KEY, 401, "replay"),
        (Signed(base, session, SUBJECT, other_issuers, presenter=True), "team/a", 403, "audience"),
        (Signed(base, session, SUBJECT, narrow), KEY, 403, "scope"),
        (Signed(base, session, STRANGER, root_device(STRANGER)), KEY, 403, "roles"),
    ]
    lines()
    for caller, key, status, check in cases:
        answer = await caller.pull(key, {"X-Request-Id": f"find-{check.split()[0]}"})
        assert answer.status == status, check
        assert answer.json["error"] in ("Unauthorized", "Forbidden"), "the client is told no more than before"
        assert set(answer.json) == {"error", "code"}
        (line,) = lines()
        assert shown(line) == ("refused a request", status, check, f"find-{check.split()[0]}")
        assert (line["method"], line["path"], line["level"]) == ("GET", f"/pull/{key}", "info")
        if check == "clock":
            assert "-412 s" in line["check"]
        if check == "signature":
            assert base.removeprefix("http://") in line["check"], "the host that it was checked for"
    listed = issuing.issue_revocation_list(SUBJECT, 1, certificates=[own]).text
    assert (await Browser(base, session).request("POST", "/revocations", listed)).status == 200
    lines()
    await Signed(base, session, SUBJECT, own).pull(KEY, {"X-Request-Id": "r"})
    assert [shown(line) for line in lines()] == [("refused a request", 401, "revoked", "r")]


async def test_a_host_that_is_not_served_is_logged(
    start: Start, session: aiohttp.ClientSession, lines: Lines
) -> None:
    base = await start({**LOGGED, "server": {"logRefusals": True, "publicHosts": ["notes.example"]}})
    lines()
    assert (await Browser(base, session).pull(KEY)).status == 421
    (line,) = lines()
    assert (line["status"], line["check"]) == (421, f"host: {base.removeprefix('http://')}")


@pytest.mark.parametrize("human", [False, True])
async def test_no_bytes_that_a_client_sends_keep_a_rejection_out_of_the_log(
    start: Start, capsys: pytest.CaptureFixture[str], lines: Lines, human: bool
) -> None:
    base = await start({**LOGGED, "server": {"logRefusals": True, "publicHosts": ["notes.example"]}})
    lines()
    logs.configure(human=human)
    address = URL(base)
    reader, writer = await asyncio.open_connection(address.host, address.port)
    writer.write(b'GET /pull/x HTTP/1.1\r\nHost: n\xff"\r\nConnection: close\r\n\r\n')
    assert b" 421 " in await reader.readline()
    await reader.read()
    writer.close()
    (line,) = capsys.readouterr().err.splitlines()
    assert "refused a request" in line
    assert "udcff" in line


async def test_no_password_of_a_request_target_is_logged(start: Start, lines: Lines) -> None:
    address = URL(await start({**LOGGED, "server": {"logRefusals": True, "accessLog": True}}))
    lines()
    reader, writer = await asyncio.open_connection(address.host, address.port)
    target = f"http://me:secret@notes.example/pull/{KEY}?token=secret"
    writer.write(f"GET {target} HTTP/1.1\r\nHost: n\r\nConnection: close\r\n\r\n".encode())
    assert b" 401 " in await reader.readline()
    await reader.read()
    writer.close()
    found = lines()
    assert [line["path"] for line in found] == [f"/pull/{KEY}"] * 2
    assert "secret" not in str(found)


async def test_the_query_of_a_request_is_not_logged_with_its_signature(
    start: Start, session: aiohttp.ClientSession, lines: Lines
) -> None:
    caller = Signed(await start(LOGGED), session, SUBJECT, root_device(SUBJECT))
    caller.tamper = lambda headers: headers.update({"X-Starfish-Sig": "A" * 86 + "=="})
    lines()
    assert (await caller.pull(f"{KEY}?token=secret")).status == 401
    (line,) = lines()
    assert f"GET /pull/{KEY} at" in line["check"]
    assert "secret" not in str(line)


async def test_rejection_of_another_sites_page_names_the_failed_check(
    start: Start, session: aiohttp.ClientSession, lines: Lines
) -> None:
    base = await start(LOGGED)
    lines()
    page = {"Origin": "https://evil.example", "Content-Type": "text/plain"}
    rejected = await Browser(base, session).request("POST", f"/push/{KEY}", b"", page)
    assert rejected.json == {"error": "Forbidden", "code": "foreign_origin"}
    (line,) = lines()
    assert (line["status"], line["check"]) == (403, "origin: https://evil.example")


async def test_a_batch_whose_credentials_do_not_hold_is_logged(
    start: Start, session: aiohttp.ClientSession, lines: Lines
) -> None:
    base = await start(LOGGED)
    caller = Signed(base, session, SUBJECT, root_device(SUBJECT), ts_ms=wall_clock_ms() - 999_000)
    params = quote(orjson.dumps({"mine": [{"id": "a"}]}))
    lines()
    headers = {"X-Request-Id": "b"}
    target = f"/batch/pull?collections=mine&params={params}"
    assert (await caller.request("GET", target, headers=headers)).status == 200
    (line,) = lines()
    assert shown(line) == ("refused the credentials of a batch", 401, "clock", "b")


@pytest.mark.parametrize(("level", "count"), [("info", 0), ("debug", 1)])
async def test_rejections_are_logged_at_the_level_debug_alone_by_default(
    start: Start, session: aiohttp.ClientSession, lines: Lines, level: str, count: int
) -> None:
    logs.configure(human=False, level=level)
    base = await start({"collections": [MINE]})
    lines()
    assert (await Browser(base, session).pull(KEY)).status == 401
    rejected = [line for line in lines() if line["logger"] == "pysync.refusals"]
    assert [line["level"] for line in rejected] == ["debug"] * count


async def test_an_access_log_has_a_line_for_each_request(
    start: Start, session: aiohttp.ClientSession, lines: Lines
) -> None:
    base = await start({"collections": [MINE], "server": {"accessLog": True}})
    lines()
    caller, anyone = Signed(base, session, SUBJECT, root_device(SUBJECT)), Browser(base, session)
    pushed = await caller.push(KEY, {"n": 1}, headers={"X-Request-Id": "p"})
    await anyone.pull(f"{KEY}?secret=1", {"X-Request-Id": "q"})
    pulled = await caller.pull(KEY, {"X-Request-Id": "r"})
    found = lines()
    shown = [
        (line["method"], line["path"], line["status"], line["bytes"], line["requestId"]) for line in found
    ]
    assert shown == [
        ("POST", f"/push/{KEY}", 200, len(pushed.body), "p"),
        ("GET", f"/pull/{KEY}", 401, len(b'{"error":"Unauthorized","code":"unauthorized"}'), "q"),
        ("GET", f"/pull/{KEY}", 200, len(pulled.body), "r"),
    ]
    assert [line.get("identity") for line in found] == [SUBJECT.user_id, None, SUBJECT.user_id]
    assert {line["logger"] for line in found} == {"pysync.access"}
    assert all(line["ms"] >= 0 for line in found)


def test_a_stream_is_logged_without_a_length() -> None:
    assert EventStreamResponse(lambda connection, head: None).size is None


async def test_access_log_is_off_by_default(
    start: Start, session: aiohttp.ClientSession, lines: Lines
) -> None:
    base = await start({"collections": [MINE]})
    lines()
    assert (await Browser(base, session).pull(KEY)).status == 401
    assert lines() == []


@pytest.mark.usefixtures("lines")
async def test_a_line_of_text_has_the_same_fields(
    start: Start, session: aiohttp.ClientSession, capsys: pytest.CaptureFixture[str]
) -> None:
    logs.configure(human=True)
    base = await start({"collections": [MINE], "server": {"logRefusals": True, "accessLog": True}})
    capsys.readouterr()
    await Browser(base, session).pull(KEY, {"X-Request-Id": "find-me"})
    rejected, request = capsys.readouterr().err.splitlines()
    assert rejected.endswith(
        f'refused a request status=401 check="no credentials" method=GET path=/pull/{KEY} [find-me]'
    )
    assert f"request method=GET path=/pull/{KEY} status=401 bytes=" in request


@pytest.mark.usefixtures("lines")
async def test_only_the_service_itself_logs_more_at_the_level_debug() -> None:
    logs.configure(human=False, level="debug")
    assert logging.getLogger("pysync.server").isEnabledFor(logging.DEBUG)
    assert not logging.getLogger("botocore.auth").isEnabledFor(logging.DEBUG)
    logs.configure(human=False, level="warning")
    assert not logging.getLogger("pysync.server").isEnabledFor(logging.INFO)

"""Numbers of thousands of digits, which Python refuses to convert, wherever a request or a file names one."""

import asyncio
from pathlib import Path

import aiohttp
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.clients import Browser, Start
from yarl import URL

from pysync import config
from pysync.server.api.files import parse_range

MANY = 5000
NUMBERS = ["0" * MANY, "0" * MANY + "1", "9" * MANY, "1" + "0" * MANY]
OPEN = {"readRoles": ["public"], "writeRoles": ["public"], "listable": True}
COLLECTIONS = [
    {"name": "notes", "storagePath": "notes/{id}", **OPEN},
    {"name": "photos", "storagePath": "photos/{id}", "allowedMimeTypes": ["image/png"], **OPEN},
    {
        "name": "chat",
        "storagePath": "chat/{id}",
        "appendOnly": {"type": "by_timestamp", "requireAuthorSignature": False},
        **OPEN,
    },
]
SIZE = 7
digits = st.one_of(
    st.from_regex("[0-9]{0,20}", fullmatch=True),
    st.builds(lambda zeros, rest: "0" * zeros + rest, st.integers(0, 6000), st.sampled_from(["", "3", "9"])),
    st.integers(1, 4000).map(lambda count: "9" * count),
)


def number(text: str) -> int | None:
    return int(text.lstrip("0") or "0") if text else None


def part(first: str, last: str, size: int) -> tuple[int, int] | None:
    """The reference: [start, end) of the bytes of a file that a range names, None where it names none."""
    low, high = number(first), number(last)
    if low is None:
        assert high is not None
        return (max(size - high, 0), size) if high else None
    return None if low >= size else (low, size if high is None else min(high + 1, size))


@given(digits, digits)
@example("0" * MANY, "")
@example("", "0" * MANY)
@example("0" * MANY + "1", "0" * MANY + "5")
def test_a_range_of_any_length_is_one_of_bytes_or_ignored(first: str, last: str) -> None:
    span = parse_range(f"bytes={first}-{last}")
    low, high = number(first), number(last)
    if (low is None and high is None) or (low is not None and high is not None and high < low):
        assert span is None
        return
    assert span is not None
    expected = part(first, last, SIZE)
    assert span.is_satisfiable(SIZE) is (expected is not None)
    if expected is not None:
        start = max(SIZE + span.start, 0) if span.start < 0 else span.start
        assert (start, SIZE if span.end is None else min(span.end, SIZE)) == expected


@given(st.text(st.characters(min_codepoint=32, max_codepoint=255), max_size=30))
def test_whatever_a_range_header_says_is_read_or_ignored(text: str) -> None:
    for requested in (text, f"bytes={text}", f"bytes={text}-", f"bytes=-{text}"):
        span = parse_range(requested)
        assert span is None or span.end is None or span.start < span.end


@pytest.fixture
async def browser(start: Start, session: aiohttp.ClientSession) -> Browser:
    browser = Browser(await start({"collections": COLLECTIONS}), session)
    pushed = await browser.request("POST", "/push/photos/a", b"x" * SIZE, {"Content-Type": "image/png"})
    assert pushed.status == 200
    return browser


@pytest.mark.parametrize(
    ("requested", "status", "content_range"),
    [
        (f"bytes={'0' * MANY}-", 206, f"bytes 0-6/{SIZE}"),
        (f"bytes={'0' * MANY}2-{'0' * MANY}3", 206, f"bytes 2-3/{SIZE}"),
        (f"bytes=-{'0' * MANY}2", 206, f"bytes 5-6/{SIZE}"),
        (f"bytes=-{'9' * MANY}", 206, f"bytes 0-6/{SIZE}"),
        (f"bytes=2-{'9' * MANY}", 206, f"bytes 2-6/{SIZE}"),
        (f"bytes=-{'0' * MANY}", 416, f"bytes */{SIZE}"),
        (f"bytes={'9' * MANY}-", 416, f"bytes */{SIZE}"),
        (f"bytes={'9' * MANY}-{'0' * MANY}", 200, None),
    ],
    ids=lambda value: None if isinstance(value, str) else value,
)
async def test_a_range_is_the_same_however_its_numbers_are_written(
    browser: Browser, requested: str, status: int, content_range: str | None
) -> None:
    for method in ("GET", "HEAD"):
        answer = await browser.request(method, "/pull/photos/a", headers={"Range": requested})
        if method == "GET":
            assert (answer.status, answer.headers.get("Content-Range")) == (status, content_range)
        else:
            assert answer.status == 200


@pytest.mark.parametrize("many", NUMBERS, ids=["zeros", "zeros-1", "nines", "ten-to-the"])
async def test_no_header_with_a_long_number_is_a_server_error(browser: Browser, many: str) -> None:
    nonce = {"X-Starfish-Nonce": "A" * 22 + "==", "Authorization": "Cap e30="}
    for headers in (
        {"Range": f"bytes={many}-{many}"},
        {"If-Range": many},
        {"If-None-Match": f'"{many}"'},
        {"If-Modified-Since": many},
        {"Last-Event-ID": many},
        {"X-Forwarded-For": many},
        {"Idempotency-Key": many},
        {"X-Starfish-Ts": many, **nonce},
        {"X-Starfish-Ts": f"-{many}", **nonce},
        {"Host": f"h:{many}"},
    ):
        for target in ("/pull/notes/a", "/pull/photos/a", "/pull/chat/a?last=1", "/list/notes"):
            assert (await browser.request("GET", target, headers=headers)).status < 500, (target, headers)
        for key in ("notes/b", "chat/b"):
            pushed = await browser.request("POST", f"/push/{key}", {"data": {}, "baseHash": ""}, headers)
            assert pushed.status < 500, (key, headers)
    stream = await browser.request("GET", "/events?collections=none", headers={"Last-Event-ID": many})
    assert stream.status == 400


@pytest.mark.parametrize("many", NUMBERS, ids=["zeros", "zeros-1", "nines", "ten-to-the"])
async def test_no_query_or_body_with_a_long_number_is_a_server_error(browser: Browser, many: str) -> None:
    for target in (
        f"/pull/chat/a?last={many}",
        f"/pull/chat/a?limit={many}",
        f"/pull/chat/a?checkpoint={many}",
        f"/list/notes?limit={many}",
        f"/list/notes?after={many}",
        f"/pull/notes/{many}",
        f"/events?collections=none&lastEventId={many}",
        f"/changes?since={many}",
        f"/changes?limit={many}",
        "/batch/pull?collections=notes&params=%7B%22notes%22:[%7B%22id%22:" + many + "%7D]%7D",
        "/batch/pull?collections=chat&params=%7B%22chat%22:[%7B%22id%22:%22a%22%7D]%7D"
        "&appendParams=%7B%22chat%22:[%7B%22last%22:" + many + "%7D]%7D",
    ):
        assert (await browser.request("GET", target)).status < 500, target[:40]
    for body in (f'{{"data":{{"n":{many}}}}}', f'{{"data":{{}},"ts":{many}}}'):
        for key in ("notes/b", "chat/b"):
            pushed = await browser.request("POST", f"/push/{key}", body.encode())
            assert pushed.status < 500, (key, body[:20])


@pytest.mark.parametrize("target", ["/push/notes/a", "/push/photos/a", "/push/chat/a", "/revocations"])
async def test_a_long_content_length_is_rejected(start: Start, target: str) -> None:
    url = URL(await start({"collections": COLLECTIONS}))
    kind = b"image/png" if "photos" in target else b"application/json"
    for many in (b"0" * MANY + b"11", b"9" * MANY):
        reader, writer = await asyncio.open_connection(url.host, url.port)
        writer.write(
            b"POST %b HTTP/1.1\r\nHost: h\r\nContent-Type: %b\r\nContent-Length: %b\r\n\r\n"
            b'{"data":{}}' % (target.encode(), kind, many)
        )
        answer = await reader.readuntil(b"}")
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert b'"code":"bad_request"' in answer
        writer.close()


@pytest.mark.parametrize("name", ["a.json", "a.toml", "a.yaml"])
def test_a_configuration_with_a_long_number_is_rejected(tmp_path: Path, name: str) -> None:
    for many in ("9" * MANY, "9" * 400):
        path = tmp_path / name
        text = {"a.json": '{"version": %s}', "a.toml": "version = %s", "a.yaml": "version: %s"}[name]
        path.write_text(text % many)
        with pytest.raises(config.ConfigError):
            config.load(path, {})
    with pytest.raises(config.ConfigError):
        config.parse({"version": 1}, {"PYSYNC_SERVER_PORT": "0" * MANY + "1"})

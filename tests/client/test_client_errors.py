"""What the errors of the client say: what is wrong, with which value, and what to do about it."""

import asyncio
import ssl
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from support.fake_server import DEVICE, KEYS, Answer, client, serving, silent_until
from support.nginx_fixture import certify

from pysync.client import Client, RetryPolicy, Unreachable
from pysync.errors import PysyncError

ONCE = {"backoff": RetryPolicy(attempts=1)}
SIGNED = {"keys": KEYS, "certificate": DEVICE}


async def problem(url: str) -> str:
    async with client(url, **ONCE) as anonymous:
        with pytest.raises(Unreachable) as raised:
            await anonymous.pull("notes/a")
    return str(raised.value)


async def test_a_rejected_connection_names_host_and_port(unused_tcp_port: int) -> None:
    assert await problem(f"http://127.0.0.1:{unused_tcp_port}") == (
        f"cannot connect to 127.0.0.1 port {unused_tcp_port}: the connection was refused; "
        "check the address, and that the server runs there"
    )


async def test_an_unknown_host_is_named() -> None:
    said = await problem("https://nowhere.invalid/v1")
    assert said.startswith("cannot connect to nowhere.invalid port 443: the host is not known (")
    assert said.endswith("); check its name, and the network")


async def test_untrusted_certificate_is_distinguished_from_a_rejected_connection(tmp_path: Path) -> None:
    certify(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "fullchain.pem", tmp_path / "privkey.pem")
    server = TestServer(web.Application(), host="localhost", scheme="https")
    await server.start_server(ssl=context)
    try:
        assert await problem(f"https://localhost:{server.port}") == (
            f"cannot connect to localhost port {server.port}: its certificate is not trusted (self-signed "
            "certificate); renew it, or name the file of its authority in SSL_CERT_FILE"
        )
    finally:
        await server.close()


async def test_server_without_tls_is_distinguished_from_an_untrusted_one() -> None:
    async with serving() as server:
        said = await problem(server.url.replace("http:", "https:"))
    assert said.startswith("cannot connect to 127.0.0.1 port ")
    assert ": TLS failed (" in said
    assert said.endswith("); check that the server speaks https there")


LIMITED: Answer = (429, {"error": "Rate limit exceeded", "code": "rate_limited"}, {"Retry-After": "30"})
LARGE: Answer = (413, {"error": "Payload too large", "code": "payload_too_large"})
NOBODY: Answer = (401, {"error": "Unauthorized", "code": "unauthorized"})
FORBIDDEN: Answer = (403, {"error": "Forbidden", "code": "forbidden"})
NO_STORE: Answer = (503, {"error": "store_unavailable", "code": "store_unavailable"})
NO_COORDINATOR: Answer = (503, {"error": "Service unavailable", "code": "coordinator_unavailable"})


@pytest.mark.parametrize(
    ("answer", "options", "said"),
    [
        (LIMITED, {}, "Rate limit exceeded: try again in 30 s"),
        (
            NOBODY, {},
            "Unauthorized: the request has no credentials; add keys (--key FILE on the command line)",
        ),
        (NOBODY, SIGNED, "Unauthorized: the server's log has the reason if `server.logRefusals` is on"),
        (FORBIDDEN, SIGNED, "Forbidden: the server's log has the reason if `server.logRefusals` is on"),
        (NO_STORE, {}, "store_unavailable: the server's store does not answer; its log has the cause"),
        (
            NO_COORDINATOR, {},
            "Service unavailable: the server's coordinator does not answer; its log has the cause",
        ),
    ],
)  # fmt: skip
async def test_an_error_says_what_to_do_and_keeps_the_text_of_the_protocol(
    answer: Answer, options: dict[str, object], said: str
) -> None:
    assert answer is not None
    async with serving(answer) as server, client(server.url, **ONCE, **options) as caller:
        with pytest.raises(PysyncError) as raised:
            await caller.pull("notes/a")
    assert str(raised.value) == said
    assert raised.value.message == answer[1]["error"]


async def test_too_large_body_is_reported_with_its_size(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(bytes(500_000))
    async with serving(LARGE, LARGE) as server, client(server.url) as anonymous:
        said = []
        for pushed in (
            anonymous.push("notes/a", {"text": "x" * 2_000}),
            anonymous.push_blob("files/a", tmp_path / "f", "image/png"),
        ):
            with pytest.raises(PysyncError) as raised:
                await pushed
            said.append(str(raised.value))
    assert said == [
        f"Payload too large: {size} bytes are more than the collection accepts (its maxBodyBytes)"
        for size in ("2,036", "500,000")
    ]


async def test_a_silent_server_is_noticed_while_the_request_goes_on() -> None:
    noticed = asyncio.Event()
    async with (
        silent_until(noticed) as url,
        Client(url, on_silence=lambda _: noticed.set()) as anonymous,
    ):
        assert (await anonymous.pull("notes/a")).hash == "h1"

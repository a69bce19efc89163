"""A webhook is posted signed, to public addresses only unless its configuration says otherwise."""

import asyncio
import socket
from collections.abc import Sequence
from typing import Any

import aiohttp
import aiohttp.web
import pytest
from aiohttp.abc import AbstractResolver, ResolveResult
from standardwebhooks.webhooks import Webhook, WebhookVerificationError
from support.clients import Browser, Start
from support.collections import collection
from support.webhook_receiver import (
    SECOND_SECRET,
    SECRET,
    Waits,
    app_of,
    receiving,
    respond,
    sending,
    webhook,
)

from pysync.webhooks.delivery import MAX_RESPONSE, is_public

SERVICE: dict[str, Any] = {"collections": [collection("notes")]}

NOT_PUBLIC = """
    127.0.0.1 127.255.255.254 0.0.0.0 0.1.2.3 10.0.0.1 172.16.0.1 172.31.255.255 192.168.1.1 169.254.169.254
    192.0.0.192 192.0.2.1 100.64.0.1 100.127.255.255 198.18.0.1 224.0.0.1 239.255.255.255 240.0.0.1
    255.255.255.255 :: ::1 fe80::1 fe80::1%eth0 fec0::1 fc00::1 fd12:3456::1 ff02::1 2001:db8::1 ::127.0.0.1
    ::ffff:127.0.0.1 ::ffff:10.0.0.1 ::ffff:169.254.169.254 2002:7f00:1::1 64:ff9b::127.0.0.1
    64:ff9b::10.0.0.1 64:ff9b:1::1 2001:0:7f00:1::1
"""
PUBLIC = (
    "1.1.1.1 8.8.8.8 100.63.255.255 100.128.0.1 172.32.0.1 2606:4700::1111 ::ffff:8.8.8.8 64:ff9b::8.8.8.8"
)


@pytest.mark.parametrize("host", NOT_PUBLIC.split())
def test_addresses_of_machines_networks_and_groups_are_not_public(host: str) -> None:
    assert not is_public(host)


@pytest.mark.parametrize("host", PUBLIC.split())
def test_addresses_of_the_internet_are_public(host: str) -> None:
    assert is_public(host)


class Names(AbstractResolver):
    """Resolves every name to the addresses of each look in turn, and to the last ones after them."""

    def __init__(self, *looks: Sequence[str]) -> None:
        self.looks = list(looks)
        self.number = 0

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        addresses = self.looks[min(self.number, len(self.looks) - 1)]
        self.number += 1
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=socket.AF_INET6 if ":" in address else socket.AF_INET,
                proto=socket.IPPROTO_TCP,
                flags=socket.AI_NUMERICHOST,
            )
            for address in addresses
        ]

    async def close(self) -> None:
        pass


async def push(base: str, session: aiohttp.ClientSession, name: str = "a") -> None:
    assert (await Browser(base, session).push(f"notes/{name}", {})).status == 200


@pytest.mark.parametrize("host", ["127.0.0.1", "[::ffff:127.0.0.1]", "localhost"])
async def test_address_of_this_machine_is_refused_before_a_connection(
    start: Start, session: aiohttp.ClientSession, host: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with receiving() as inbox:
        base = await start(SERVICE)
        url = inbox.url.replace("127.0.0.1", host)
        waits = Waits()
        async with sending(app_of(start), webhook(url, allowPrivate=False), sleep=waits):
            await push(base, session)
            await waits.first(2)
        assert inbox.deliveries == []
        assert "is not a public address, and allowPrivate is not set" in caplog.text


async def test_name_that_leads_to_this_machine_at_the_second_look_is_refused(
    start: Start, session: aiohttp.ClientSession
) -> None:
    """The first look finds an address that nobody has."""
    async with receiving() as inbox:
        base = await start(SERVICE)
        url = inbox.url.replace("127.0.0.1", "receiver.example")
        names, waits = Names(["2d00::1"], ["127.0.0.1"]), Waits()
        hook = webhook(url, allowPrivate=False)
        async with sending(app_of(start), hook, sleep=waits, resolver=names, timeout_s=0.5):
            await push(base, session)
            await waits.first(3)
        assert names.number >= 2
        assert inbox.deliveries == []


async def test_redirect_to_a_private_address_is_not_followed(
    start: Start, session: aiohttp.ClientSession
) -> None:
    async with receiving() as private, receiving(respond(307, Location=private.url)) as inbox:
        base = await start(SERVICE)
        async with sending(app_of(start), webhook(inbox.url), sleep=Waits()):
            await push(base, session)
            await inbox.first(2)
        assert private.deliveries == []


@pytest.mark.parametrize("secret", [SECRET, SECOND_SECRET])
async def test_each_of_several_secrets_signs(
    start: Start, session: aiohttp.ClientSession, secret: str
) -> None:
    async with receiving() as inbox:
        inbox.secret = secret
        base = await start(SERVICE | {"webhooks": [webhook(inbox.url, secret=[SECRET, SECOND_SECRET])]})
        await push(base, session)
        (one,) = await inbox.first(1)
        assert one.headers["content-type"] == "application/json"
        assert len(one.headers["webhook-signature"].split(" ")) == 2


async def test_signature_is_of_the_secret_the_id_the_time_and_the_body(
    start: Start, session: aiohttp.ClientSession
) -> None:
    async with receiving() as inbox:
        base = await start(SERVICE | {"webhooks": [webhook(inbox.url)]})
        await push(base, session)
        (one,) = await inbox.first(1)
        Webhook(SECRET).verify(one.raw, one.headers)
        later = str(int(one.headers["webhook-timestamp"]) + 1)
        for secret, raw, changed in (
            (SECOND_SECRET, one.raw, {}),
            (SECRET, one.raw + b" ", {}),
            (SECRET, one.raw, {"webhook-id": "1"}),
            (SECRET, one.raw, {"webhook-timestamp": later}),
        ):
            with pytest.raises(WebhookVerificationError):
                Webhook(secret).verify(raw, one.headers | changed)


async def test_endless_response_is_not_read_further_than_4_kb(
    start: Start, session: aiohttp.ClientSession
) -> None:
    written = asyncio.Event()

    async def endless(request: aiohttp.web.Request) -> aiohttp.web.StreamResponse:
        response = aiohttp.web.StreamResponse(status=500)
        await response.prepare(request)
        try:
            while True:
                await response.write(b"x" * MAX_RESPONSE)
        finally:
            written.set()

    async with receiving(endless, respond(200)) as inbox:
        base = await start(SERVICE)
        waits = Waits()
        async with sending(app_of(start), webhook(inbox.url), sleep=waits):
            await push(base, session)
            await inbox.first(2)
            await written.wait()
        assert len(waits.seconds) == 1


async def test_log_does_not_show_the_url_which_may_have_a_token(
    start: Start, session: aiohttp.ClientSession, caplog: pytest.LogCaptureFixture
) -> None:
    async def malformed(request: aiohttp.web.Request) -> aiohttp.web.StreamResponse:
        assert request.transport is not None
        request.transport.write(b"this is no HTTP\r\n\r\n")
        request.transport.close()
        return aiohttp.web.Response()

    caplog.set_level("INFO")
    async with receiving(malformed) as inbox:
        base = await start(SERVICE)
        waits = Waits()
        async with sending(app_of(start), webhook(f"{inbox.url}?token=6a1f"), sleep=waits):
            await push(base, session)
            await inbox.first(2)
        logged = [record.getMessage() for record in caplog.records if record.name == "pysync.webhooks"]
        assert "this is no HTTP" in logged[0]
        assert "6a1f" not in "".join(logged)


async def test_response_of_2xx_is_accepted_whatever_becomes_of_its_body(
    start: Start, session: aiohttp.ClientSession
) -> None:
    async def broken(request: aiohttp.web.Request) -> aiohttp.web.StreamResponse:
        response = aiohttp.web.StreamResponse(status=202, headers={"Content-Length": "10"})
        await response.prepare(request)
        assert request.transport is not None
        request.transport.abort()
        return response

    async with receiving(broken) as inbox:
        base = await start(SERVICE)
        waits = Waits()
        async with sending(app_of(start), webhook(inbox.url), sleep=waits):
            await push(base, session, "a")
            await inbox.first(1)
            await push(base, session, "b")
            await inbox.first(2)
        assert inbox.keys == ["a", "b"]
        assert waits.seconds == []


async def test_proxy_of_the_environment_is_not_used(
    start: Start, session: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with receiving() as inbox:
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
        base = await start(SERVICE | {"webhooks": [webhook(inbox.url)]})
        await push(base, session)
        await inbox.first(1)

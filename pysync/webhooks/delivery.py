"""The requests to the receiver of a webhook: their signatures, and the addresses that they may go to."""

import hmac
import socket
from base64 import b64decode, b64encode
from contextlib import suppress
from email.utils import parsedate_to_datetime
from errno import EACCES
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import Final, NamedTuple

import aiohttp
from aiohttp.abc import AbstractResolver

from pysync.config import WebhookConfig
from pysync.protocol import JSON_TYPE

MAX_RESPONSE: Final = 4096
"""Number of bytes of a response's body that are read."""
_GLOBAL_UNICAST: Final = IPv6Network("2000::/3")
_PROTOCOLS: Final = IPv4Network("192.0.0.0/24")
"""Not of the internet, though some versions of Python say so. A cloud has its metadata there."""
_NAT64: Final = IPv6Network("64:ff9b::/96")


class Rejection(NamedTuple):
    """The reason why a request was not accepted, and the status of the response; 0 without one.
    `retry_after_s` is the time that the receiver asks to wait for, in seconds; None if it does not say."""

    reason: str
    status: int = 0
    retry_after_s: float | None = None


def open_session(
    webhook: WebhookConfig, timeout_s: float, resolver: AbstractResolver | None
) -> aiohttp.ClientSession:
    """Return the session for `post`, whose requests may take `timeout_s`. It decides on each address that it
    is about to connect to, so a name that resolves to another one every time gains nothing."""

    def open_socket(address: aiohttp.AddrInfoType) -> socket.socket:
        family, kind, protocol, _, (host, *_) = address
        if not (webhook.allow_private or is_public(str(host))):
            raise PermissionError(EACCES, f"{host} is not a public address, and allowPrivate is not set")
        return socket.socket(family, kind, protocol)

    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(resolver=resolver, use_dns_cache=False, socket_factory=open_socket),
        timeout=aiohttp.ClientTimeout(total=timeout_s),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        read_bufsize=MAX_RESPONSE,
    )


async def post(
    session: aiohttp.ClientSession, webhook: WebhookConfig, id_: str, body: bytes, now_s: int
) -> Rejection | None:
    """Post a signed body with this identifier. Returns None if the response is 2xx. Follows no redirect."""
    signed = b"%b.%d.%b" % (id_.encode(), now_s, body)
    keys = [b64decode(secret.removeprefix("whsec_")) for secret in webhook.secret]
    signatures = [b64encode(hmac.digest(key, signed, "sha256")).decode() for key in keys]
    headers = {
        "Content-Type": JSON_TYPE,
        "User-Agent": "pysync",
        "webhook-id": id_,
        "webhook-timestamp": str(now_s),
        "webhook-signature": " ".join(f"v1,{signature}" for signature in signatures),
    }
    try:
        async with session.post(webhook.url, data=body, headers=headers, allow_redirects=False) as response:
            if 200 <= response.status < 300:
                return None
            text = b""
            with suppress(aiohttp.ClientError, TimeoutError):
                text = await response.content.read(MAX_RESPONSE)
    except aiohttp.ClientResponseError as error:  # its text has the URL, which may have a token
        return Rejection(error.message)
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        return Rejection(str(error) or "no response in time")
    wait_s = _seconds(response.headers.get("Retry-After", ""), now_s)
    return Rejection(f"{response.status} {text!r}", response.status, wait_s)


def is_public(host: str) -> bool:
    """Return True for the address of a host in the internet: not of this machine, a private or shared
    network, a link or a group. IPv4 addresses in IPv6 ones count as what they are."""
    address: IPv4Address | IPv6Address = ip_address(host.partition("%")[0])
    if isinstance(address, IPv6Address):
        if address.ipv4_mapped is not None or address in _NAT64:
            address = IPv4Address(address.packed[-4:])
        elif address not in _GLOBAL_UNICAST or address.sixtofour is not None:
            return False
    return address.is_global and not address.is_multicast and address not in _PROTOCOLS


def _seconds(retry_after: str, now_s: int) -> float | None:
    with suppress(ValueError, OverflowError):
        if retry_after.isdecimal():
            return float(retry_after)
        return parsedate_to_datetime(retry_after).timestamp() - now_s
    return None

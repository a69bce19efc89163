"""Signatures over requests and over a document's author, made (clients-and-crypto sections 2 and 5).

The native core verifies them. Pure: the caller passes clock and randomness.
"""

import base64
import re
import socket
from functools import lru_cache
from typing import Final, Protocol
from urllib.parse import urlsplit

import orjson

from pysync import protocol
from pysync._core import canonicalize, request_message

DOCUMENT_AUTHOR: Final = "starfish-doc-author-v1"
APPEND_AUTHOR: Final = "starfish-append-author-v1"

_DEFAULT_PORTS = {"http": 80, "https": 443}


class Signer(Protocol):
    """What signs: `pysync.keys.Keys`, or a device that keeps its private key to itself."""

    @property
    def ed_pub(self) -> str:
        """The public key, 64 hex digits."""

    def sign(self, message: bytes) -> str:
        """The Ed25519 signature in base64."""


def sign_request(
    signer: Signer, method: str, target: str, body: bytes, host: str, ts_ms: int, nonce: bytes
) -> dict[str, str]:
    """The headers that sign one request. `target` is path and query as the client puts them after its base
    URL; `body` is empty unless it is JSON; `nonce` is 16 fresh random bytes."""
    nonce_text = base64.b64encode(nonce).decode()
    message = request_message(method, target, body, host, ts_ms, nonce_text)
    return {
        protocol.HEADER_SIGNATURE: signer.sign(message),
        protocol.HEADER_TIMESTAMP: str(ts_ms),
        protocol.HEADER_NONCE: nonce_text,
    }


def sign_author(signer: Signer, tag: str, document_key: str, data: bytes) -> dict[str, str]:
    """The body members that prove who wrote `data`: JSON text as the server will store it, so without the
    unsafe keys. `tag` is DOCUMENT_AUTHOR or APPEND_AUTHOR."""
    message = canonicalize(b'{"d":' + data + b',"k":' + orjson.dumps(document_key) + b"}")
    return {
        "authorPubkey": signer.ed_pub,
        "authorSignature": signer.sign(tag.encode() + b"\n" + message),
    }


def host_of(base_url: str) -> str:
    """The host that requests to `base_url` sign: in lower case, international names encoded, without user or
    default port; `""` where the URL has none. Raises ValueError for a port or name that cannot be."""
    url = urlsplit(base_url)
    if url.scheme not in _DEFAULT_PORTS or not url.hostname:
        return ""
    name = url.hostname
    if ":" in name:
        name = f"[{name}]"
    elif re.fullmatch(r"[0-9.]+", name):
        # 127.1 is an address in short: it is the same server whichever way it is written.
        try:
            name = socket.inet_ntoa(socket.inet_aton(name))
        except OSError:
            raise ValueError(f"{name} is no address") from None
    elif not name.isascii():
        name = name.encode("idna").decode()
    port = "" if url.port in (None, _DEFAULT_PORTS[url.scheme]) else f":{url.port}"
    return name + port


@lru_cache(maxsize=256)
def host_of_header(host: str, scheme: str) -> str:
    """The host that a request signed, from its `Host` header and the scheme it came by."""
    name, separator, port = host.lower().rpartition(":")
    return name if separator and port == str(_DEFAULT_PORTS.get(scheme)) else host.lower()

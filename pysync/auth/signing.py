"""Signatures of requests and authors (docs/reference/protocol.md#request-signature).

The native core verifies the signatures. The functions that sign are pure: clock and randomness are arguments.
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
    """A source of signatures: `IdentityKeys`, or a device that does not reveal its private key."""

    @property
    def ed_pub(self) -> str:
        """The Ed25519 public key, 64 hex digits."""

    def sign(self, message: bytes) -> str:
        """Return the Ed25519 signature over `message`, in base64."""


def sign_request(
    signer: Signer, method: str, target: str, body: bytes, host: str, ts_ms: int, nonce: bytes
) -> dict[str, str]:
    """Return the headers that sign one request. `target` is the path and query as the client appends them to
    its base URL; `body` is empty unless it is JSON; `nonce` is 16 fresh random bytes."""
    nonce_text = base64.b64encode(nonce).decode()
    message = request_message(method, target, body, host, ts_ms, nonce_text)
    return {
        protocol.HEADER_SIGNATURE: signer.sign(message),
        protocol.HEADER_TIMESTAMP: str(ts_ms),
        protocol.HEADER_NONCE: nonce_text,
    }


def sign_author(signer: Signer, tag: str, document_key: str, data: bytes) -> dict[str, str]:
    """Return the body members that prove the author of `data`, which is JSON text as the server stores it,
    that is without unsafe keys. `tag` is DOCUMENT_AUTHOR or APPEND_AUTHOR."""
    message = canonicalize(b'{"d":' + data + b',"k":' + orjson.dumps(document_key) + b"}")
    return {
        "authorPubkey": signer.ed_pub,
        "authorSignature": signer.sign(tag.encode() + b"\n" + message),
    }


def canonical_host(base_url: str) -> str:
    """Return the host that requests to `base_url` sign: lower case, international names encoded, without user
    or default port; `""` if the URL has none. Raises ValueError for an invalid port or name."""
    url = urlsplit(base_url)
    if url.scheme not in _DEFAULT_PORTS or not url.hostname:
        return ""
    name = url.hostname
    if ":" in name:
        name = f"[{name}]"
    elif re.fullmatch(r"[0-9.]+", name):
        # 127.1 is short for 127.0.0.1: both spellings name the same server.
        try:
            name = socket.inet_ntoa(socket.inet_aton(name))
        except OSError:
            raise ValueError(f"{name} is no address") from None
    elif not name.isascii():
        name = name.encode("idna").decode()
    port = "" if url.port in (None, _DEFAULT_PORTS[url.scheme]) else f":{url.port}"
    return name + port


@lru_cache(maxsize=256)
def canonical_host_of_header(host: str, scheme: str) -> str:
    """Return the host that a request signed, given its `Host` header and scheme."""
    name, separator, port = host.lower().rpartition(":")
    return name if separator and port == str(_DEFAULT_PORTS.get(scheme)) else host.lower()
